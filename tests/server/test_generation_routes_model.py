"""A server whose model has names, a tokenizer, a template and sampling defaults of the operator's choice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.server.live import LiveServer


def test_a_server_uses_the_options_about_its_model(tiny_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "bare"
    generation = {"temperature": 0.25, "top_k": 7, "eos_token_id": [71, 72]}  # "e" and "f"
    directory.mkdir()
    shutil.copy(tiny_model / "config.json", directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "chat.jinja").write_text("[{{ messages[0].content }}]")
    options = {"tokenizer": str(tiny_model), "chat_template": str(tmp_path / "chat.jinja")}
    with LiveServer(directory, served_model_name="a,b", sampling_defaults="model", **options) as server:
        client = server.client
        cards = client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        assert cards[0] == cards[1] | {"id": "a"}
        assert client.get("/v1/models/b").json() == cards[1]
        body = {"messages": [{"role": "user", "content": "xyz"}], "max_tokens": 4}
        for name in ("a", "b", str(directory)):
            reply = client.post("/v1/chat/completions", json=body | {"model": name}).json()
            assert reply["model"] == "a"
            assert reply["choices"][0]["message"]["content"] == "[xyz"  # the fake worker repeats the prompt
        refused = client.post("/v1/chat/completions", json=body | {"model": "c"})
        assert refused.status_code == 404 and "serves 'a'" in refused.json()["error"]["message"]
        (rendered,) = client.post("/v1/completions/render", json={"prompt": "a", "max_tokens": 1}).json()
        assert rendered["sampling_params"] == {"max_tokens": 1, "temperature": 0.25, "top_k": 7}
        given = {"prompt": "a", "max_tokens": 1, "temperature": 1, "top_k": 0}
        (rendered,) = client.post("/v1/completions/render", json=given).json()
        assert rendered["sampling_params"] == {"max_tokens": 1, "temperature": 1, "top_k": 0}
        for end in (71, 72, 2):  # the last one is the tokenizer's own
            reply = client.post("/v1/completions", json={"prompt": [67, 68, 69, end], "max_tokens": 9}).json()
            choice = reply["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
        info = client.get("/model_info").json()
        assert (info["served_model_name"], info["tokenizer_path"]) == ("a", str(tiny_model))
