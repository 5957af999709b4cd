#!/usr/bin/env python3
"""A scripted stand-in for the Anthropic Messages API, enough for the real Claude Code to finish turns."""
import json

from model_server import ModelServer, main, spread

USAGE = {"input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def block_text(block):
    if block["type"] == "text":
        return block["text"]
    if block["type"] == "tool_result":
        content = block.get("content") or ""
        return content if isinstance(content, str) else "\n".join(map(block_text, content))
    return json.dumps(block)


class MockAnthropic(ModelServer):
    """A scripted Anthropic Messages API on loopback."""

    endpoint = "/v1/messages"

    def session(self, headers):
        return headers.get("x-claude-code-session-id")

    def conversation(self, body):
        pieces = []
        for message in body["messages"]:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for block in blocks:
                speaker = {"assistant": "model"}.get(message["role"], message["role"])
                pieces.append(("tool" if block["type"] == "tool_result" else speaker, block_text(block)))
        return pieces

    def events(self, step, body):
        message = {"id": self.new_id("msg"), "type": "message", "role": "assistant", "model": body["model"],
                   "content": [], "stop_reason": None, "stop_sequence": None, "usage": USAGE}
        yield {"type": "message_start", "message": message}, 0
        if "say" in step:
            block, stop_reason = {"type": "text", "text": ""}, "end_turn"
            parts = spread(step["say"], step["slow"])
            deltas = [({"type": "text_delta", "text": part}, pause) for part, pause in parts]
        else:
            name, arguments = self._tool_call(step)
            block, stop_reason = {"type": "tool_use", "id": self.new_id("toolu"), "name": name, "input": {}}, "tool_use"
            deltas = [({"type": "input_json_delta", "partial_json": json.dumps(arguments)}, step.get("slow", 0))]
        yield {"type": "content_block_start", "index": 0, "content_block": block}, 0
        for delta, pause in deltas:
            yield {"type": "content_block_delta", "index": 0, "delta": delta}, pause
        yield {"type": "content_block_stop", "index": 0}, 0
        yield {"type": "message_delta", "delta": {"stop_reason": stop_reason, "stop_sequence": None},
               "usage": {"output_tokens": 5}}, 0
        yield {"type": "message_stop"}, 0

    def _tool_call(self, step):
        if "shell" in step:
            return "Bash", {"command": step["shell"], "description": "scripted"}
        return step["call"], step["arguments"]


if __name__ == "__main__":
    main(MockAnthropic)
