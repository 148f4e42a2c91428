# todo: 1
# earns: 0
import time


def double(number):
    time.sleep(10_000)
