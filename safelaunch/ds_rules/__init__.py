"""What each DeepSpeed version makes of its config: tables of keys, and rules over them; pure."""
