"""``python -m nanochat`` is the command ``nanochat``."""

import sys

from nanochat.cli import main

sys.exit(main())
