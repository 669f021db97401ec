"""The event-loop side: from request to plan, from step output to text. No torch, no HTTP.

Files in the order a request meets them:

* engine: submit, abort, statistics, start, drain, stop; owns the sinks
* pipeline: the five stages (tokenize, schedule, launch, collect, detokenize), of which the first is `intake`
* intake: encoding, grammars, refusals
* active_request: a request from submission to its last output, and its sequences on the way back
* channel: bounded, closable queue between two stages
* admission: a request and its token ids become sequences, or a refusal
* queue_bounds: how much may wait, in all and of each tenant
* start_rate: how fast what waits is started, and so when a refused client should come again
* deadlines: when the time of requests is over
* grammar_cache: compiled grammars that are kept, and the lane in which new ones are made
* grammar: compiles the shape an output must have, in the process that is
* grammar_worker: this process
* json_schema: what of a JSON schema can be enforced
* tokenizer: text to token ids, token ids to bytes
* gguf_tokenizer: the tokenizer that a GGUF file holds
* chat_template: a conversation becomes a prompt
* sequence: one sequence as the scheduler knows it, with its block table
* waiting: the waiting sequences, in the order of the policy
* scheduler: which sequences compute how many tokens in the next step; what a finished step means
* live_sequences: where every sequence stands; slots, steps in flight, and when what they hold comes back
* step_planner: the next step: whose turn it is, and for how many tokens
* search_planner: what beam searches add to it
* plan_draft: a step in the making: its budget, slots and blocks, until it is a plan
* step_outputs: what a step that went well gave, to whom
* step_failures: what a step that failed means, and who is suspected of it
* scheduler_invariants: what holds of all of them between two calls
* suspects: sequences of failed steps, tried by halves until the culprit is found
* beams: the rows of a beam search, which the scheduler moves as one
* beam_search: which rows of a beam search go on, what is finished, when it is over
* sequence_limits: how long a sequence may be
* step_limit: the most tokens of a step, fewer for a while after one lacked memory
* restart_budget: how often a lost device may be opened anew
* kv_groups: blocks of all KV groups together: match a cached prefix, extend, let windows pass, release
* prefix_cache: digests of sequences, the longest cached prefix of one, what becomes findable
* kv_managers: what the layers of one group need of the past: all of it, a window, a state
* host_tier: blocks in the host's memory, of preempted sequences and of evicted prefixes
* swap_cost: whether a preempted sequence comes back cheaper from there or computed again
* kv_pool: the blocks that all groups share: reference counts, free list in eviction order, prefix index
* cache_log: what becomes of the prefix cache, for who publishes it
* best_of: more continuations than are given, and the best of them
* detokenizer: token ids to text, incrementally
* stop_strings: where a stop string begins in text that still grows
"""
