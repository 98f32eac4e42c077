"""`python -m safelaunch`."""

from safelaunch.cli import run

if __name__ == "__main__":
    run()
