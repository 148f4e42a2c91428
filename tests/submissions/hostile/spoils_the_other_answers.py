# todo: 1
# earns: 0
import builtins
import threading
import time

names = globals()


def spoil():
    while True:
        names["add_one"] = names["is_even"] = lambda number: 0
        time.sleep(0.01)


threading.Thread(target=spoil, daemon=True).start()


def double(number):
    return 0
