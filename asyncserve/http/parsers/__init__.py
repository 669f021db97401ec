"""What a model wrote → what it meant: reasoning, content and tool calls, as each model family writes them."""
