# todo: 1
# earns: 8
kernel = get_ipython().kernel


def show(**content):
    kind = "display_data"
    kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())


show(data={"text/plain": 7, "image/png": {"a": []}}, metadata=[])
show(data="text", metadata={}, transient={"display_id": ["a"]})


def double(number):
    show(data=None, metadata=None)
    if isinstance(number, str):
        raise ValueError("number")
    return 2 * number
