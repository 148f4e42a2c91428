# todo: 1
# earns: 8
import sys
import threading
import time
import warnings


def talk():
    while True:
        print("still working", file=sys.stderr)
        print(0.5)
        time.sleep(0.05)


threading.Thread(target=talk, daemon=True).start()


def double(number):
    warnings.warn("careful")
    time.sleep(0.1)
    if isinstance(number, str):
        raise ValueError("number")
    return 2 * number
