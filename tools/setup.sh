#!/bin/sh
# Makes the environment: python, torch, nanochat. Called by the Makefile with PYTHON, VENV and TORCH.
#
# TORCH is empty (choose), "system" (see the torch that is installed) or a version.
set -eu

DEFAULT_TORCH=2.13.0
: "${PYTHON:=python3}" "${VENV:=.venv}" "${TORCH:=}"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
    echo "setup: $PYTHON is not Python 3.11 or newer: install one and say which, make setup PYTHON=python3.11" >&2
    exit 2
}

if [ -z "$TORCH" ]; then
    if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        TORCH=system
        echo "setup: the installed torch sees a GPU and is used; TORCH=$DEFAULT_TORCH would install another one"
    else
        TORCH=$DEFAULT_TORCH
    fi
fi

options=""
[ "$TORCH" = system ] && options="--system-site-packages"
if [ ! -x "$VENV/bin/python" ]; then
    # shellcheck disable=SC2086
    if ! "$PYTHON" -m venv $options "$VENV" 2>/dev/null; then
        # Debian ships Python without ensurepip: take pip along from outside when there is one.
        rm -rf "$VENV"
        "$PYTHON" -m pip --version >/dev/null 2>&1 || {
            echo "setup: $PYTHON can make no environment: install its venv module (on Debian: apt install python3-venv)" >&2
            exit 2
        }
        # shellcheck disable=SC2086
        "$PYTHON" -m venv --without-pip $options "$VENV"
        "$PYTHON" -m pip --python "$VENV/bin/python" install --quiet pip
    fi
fi

pip="$VENV/bin/python -m pip --disable-pip-version-check"
if [ "$TORCH" = system ]; then
    "$VENV/bin/python" -c 'import torch' 2>/dev/null || {
        echo "setup: TORCH=system, but $PYTHON has no torch: install it there, or give TORCH=$DEFAULT_TORCH" >&2
        exit 2
    }
else
    echo "setup: installing torch $TORCH"
    $pip install --quiet "torch==$TORCH"
fi
echo "setup: installing nanochat"
$pip install --quiet --editable ".[demo]"
touch "$VENV/.installed"
