"""The OpenAI dialect: bodies, and what becomes of them."""
