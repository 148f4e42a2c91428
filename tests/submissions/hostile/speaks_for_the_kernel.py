# todo: 1
# earns: 0
kernel = get_ipython().kernel


def say(kind, **content):
    kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())


def double(number):
    say("display_data", data={"text/plain": "right"}, metadata={}, transient={"display_id": "a"})
    say("update_display_data", data={"text/plain": "1"}, metadata={}, transient={"display_id": "a"})
    say("clear_output", wait=False)
    say("comm_open", comm_id="x", target_name="jupyter.widget", data={})
    say("error", ename="NotImplementedError", evalue="", traceback=[])
    say("status", execution_state="idle")
    return 0
