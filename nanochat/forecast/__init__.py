"""What a run will take on a machine: memory, time, money, text and disk. Numbers only, no torch."""
