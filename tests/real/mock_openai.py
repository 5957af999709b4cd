#!/usr/bin/env python3
"""A scripted stand-in for the OpenAI Responses API, enough for the real Codex CLI to finish turns."""
import json

from model_server import ModelServer, main, spread

USAGE = {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 5,
         "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 15}
CALLS = ("function_call", "custom_tool_call")


def parts_text(parts):
    return parts if isinstance(parts, str) else "\n".join(part.get("text", "") for part in parts or [])


def tools_offered(body):
    """{name: namespace or None} of the tools on offer; newer clients nest some in namespaces."""
    offered = {}
    for tool in body.get("tools") or []:
        offered[tool.get("name")] = None
        offered.update((inner.get("name"), tool["name"]) for inner in tool.get("tools") or [])
    return offered


class MockOpenAI(ModelServer):
    """A scripted OpenAI Responses API on loopback."""

    endpoint = "/v1/responses"

    def session(self, headers):
        return headers.get("thread-id")

    def conversation(self, body):
        return [self._piece(item) for item in body["input"]]

    def _piece(self, item):
        kind = item.get("type", "message")
        if kind == "message":
            return {"assistant": "model"}.get(item["role"], item["role"]), parts_text(item["content"])
        if kind in CALLS:
            return "model", item.get("arguments") or item.get("input") or ""
        if kind.endswith("_output"):
            return "tool", parts_text(item.get("output"))
        return kind, json.dumps(item)

    def events(self, step, body):
        answer = {"id": self.new_id("resp"), "status": "in_progress"}
        yield {"type": "response.created", "response": answer}, 0
        if "say" in step:
            item = {"type": "message", "id": self.new_id("msg"), "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": step["say"], "annotations": []}]}
            yield {"type": "response.output_item.added", "output_index": 0,
                   "item": dict(item, content=[], status="in_progress")}, 0
            for part, pause in spread(step["say"], step["slow"]):
                yield {"type": "response.output_text.delta", "item_id": item["id"], "output_index": 0,
                       "content_index": 0, "delta": part}, pause
        else:
            item = self._tool_call(step, tools_offered(body))
            yield {"type": "response.in_progress", "response": answer}, step.get("slow", 0)
        yield {"type": "response.output_item.done", "output_index": 0, "item": item}, 0
        yield {"type": "response.completed",
               "response": dict(answer, status="completed", output=[item], usage=USAGE)}, 0

    def _tool_call(self, step, offered):
        call_id = self.new_id("call")
        if "call" in step:
            name, arguments = step["call"], step["arguments"]
        elif "exec_command" in offered:
            name, arguments = "exec_command", {"cmd": step["shell"]}
        elif "shell_command" in offered:
            name, arguments = "shell_command", {"command": step["shell"]}
        elif "exec" in offered:  # "code mode": the model writes JavaScript
            source = "const r = await tools.exec_command(%s); text(r.output);" % json.dumps({"cmd": step["shell"]})
            return {"type": "custom_tool_call", "id": self.new_id("ct"), "call_id": call_id, "name": "exec",
                    "input": source}
        else:
            raise ValueError("no shell tool among %s" % sorted(map(str, offered)))
        item = {"type": "function_call", "id": self.new_id("fc"), "call_id": call_id, "name": name,
                "arguments": json.dumps(arguments)}
        return dict(item, namespace=offered[name]) if offered.get(name) else item


if __name__ == "__main__":
    main(MockOpenAI)
