"""The Anthropic dialect: the Messages API, over the chats of :mod:`segue.api.openai`."""
