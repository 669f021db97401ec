"""What a model wrote → what it meant: reasoning, content and tool calls, each model family's way of writing."""
