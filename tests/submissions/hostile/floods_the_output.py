# todo: 1
# earns: 0
import sys

print("x" * 30_000_000)
for _ in range(200):
    print("y" * 1_000_000)


def double(number):
    for _ in range(50):
        sys.stdout.write("z" * 1_000_000)
    raise ValueError("e" * 30_000_000)
