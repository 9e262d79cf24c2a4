"""Python imports this at its start, if it finds it: workers that another process starts can then be held."""

import sys

if any(word.startswith("segue.worker.") for word in sys.orig_argv):
    import gc

    gc.disable()  # as the real worker does, until it has imported all
    from tests.support.held_steps import hold_this_process

    hold_this_process()
