"""safelaunch: a launcher for DeepSpeed that checks first and names the rank at fault."""

__version__ = "0.1.0"
