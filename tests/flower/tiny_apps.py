"""The smallest asynchronous federation: a server that counts replies, clients that say who they are."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """One line a reply in the file ``out``, until there are ``updates`` of them."""
    out, updates = Path(str(context.run_config["out"])), int(context.run_config["updates"])
    until_s = time.monotonic() + float(context.run_config["most_s"])
    waiting: dict[str, int] = {}
    replies = 0
    while replies < updates and time.monotonic() < until_s:
        for node_id in set(grid.get_node_ids()) - set(waiting.values()):
            message = Message(RecordDict(), dst_node_id=node_id, message_type=MessageType.TRAIN)
            for message_id in grid.push_messages([message]):
                if message_id:
                    waiting[message_id] = node_id
        for reply in grid.pull_messages(list(waiting)):
            node_id = waiting.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                replies += 1
                with out.open("a") as lines:
                    print(json.dumps({"node_id": node_id, **reply.content["who"]}), file=lines)
        time.sleep(0.1)
    assert replies == updates, f"{replies} of {updates} replies"


@client.train()
def train(message: Message, context: Context) -> Message:
    who = ConfigRecord({"partition": int(context.node_config["partition-id"])})
    return Message(RecordDict({"who": who}), reply_to=message)
