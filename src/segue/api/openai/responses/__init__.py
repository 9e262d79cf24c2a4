"""OpenAI's Responses API, without state: its body becomes a chat, and the chat's reply becomes items."""
