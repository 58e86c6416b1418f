"""From a file of questions to a recorded and enqueued job. No torch.

source: bytes of a file or standard input, unzipped, in bounded pieces. formats: which format they are in.
records: the rows of each format. rows: what a row asks, or why it cannot be asked. openai: OpenAI Batch lines.
refusal: why a row cannot be asked. submit: all of it.
"""
