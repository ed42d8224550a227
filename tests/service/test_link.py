import pickle
from multiprocessing import Pipe

from edgespec.service.link import Link


def test_messages_arrive_in_order_and_sending_never_waits():
    ours, theirs = Pipe()
    link = Link(ours, max_silence_s=60)
    sent = [b"small", b"x" * 2**20, b"small again", b"y" * 2**20, *(b"%d" % n for n in range(2000))]
    for message in sent:  # more than the pipe holds, and nobody reads yet
        link.send(message)
    assert [pickle.loads(theirs.recv_bytes()) for _ in sent] == sent
    link.send("the queue is empty again")
    assert pickle.loads(theirs.recv_bytes()) == "the queue is empty again"
    theirs.close()
    link.send("to nobody")
    link.close()
