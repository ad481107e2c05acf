"""The one training loop. It never knows which stage it serves."""
