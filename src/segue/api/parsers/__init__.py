"""What a model's text consists of: reasoning, content and tool calls, found while the text comes."""
