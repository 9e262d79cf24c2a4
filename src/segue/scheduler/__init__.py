"""The scheduler: it decides what each step runs. Pure Python data in and out, without torch or sockets."""
