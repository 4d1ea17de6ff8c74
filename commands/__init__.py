"""What the command line consists of. Modules are imported when a command needs them."""
