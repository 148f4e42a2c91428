# todo: 1
# earns: 0
def double(number):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
