//! What `--help` says behind the flags.

pub const RUN_NOTES: &str = "\
Byte counts (--stats, --json):
  needed  expert_bytes_needed: the sum over all passes of the union of the
          routes (every expert that any row of the pass is routed to, counted
          once a layer) times the bytes of an expert
  cached  expert_bytes_cached: of these, bytes that had stayed in memory since
          an earlier use
  read    expert_bytes_read: expert bytes asked for
  device  device_bytes: read, widened to whole pages

Reads (--stats; --json: stats.reads, times in seconds, bytes of whole pages):
  account   device = needed + wasted + reread + pending: of experts that were
            used; of guesses and broken-off passes; read again from another
            drive because they were late; not decided yet. cached: of experts
            that were used and not read, since they had stayed in memory
  barriers  a barrier is what one layer of one pass waits for: count, time_s
            from the demands to the last landings, and bound_s, the shortest
            time in which the drives could deliver, at their rates at that time
  drives    name, device_bytes, share, reads, failed_reads, busy_s (with a read
            in flight), idle_s (without one while something waited that the
            drive holds), depth (most reads in flight); since the start: rate
            (bytes a second, by the last reads), and p50_s, p90_s, p99_s and
            longest_s from issue to landing

Events (--events): one JSON object a line for each read that has ended:
  drive, layer, expert, extent, start, bytes   what was read, from where
  device_bytes                                 whole pages
  class, barrier                               demand or hint, and of which
  asked_ns, issued_ns, landed_ns               on one clock
  ok                                           whether all bytes arrived

Exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted by Ctrl-C (what
was generated until then is shown). A closed standard output ends quietly with 0.";

pub const JOBS_NOTES: &str = "\
A line of IN:
  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\":
   {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 100}}
Fields of body:
  messages            role, content (a text, or parts of type text), name;
                      reasoning_content of an assistant. /v1/completions has
                      prompt instead: a text, or a list of token ids
  max_tokens          or max_completion_tokens
  temperature, top_p, top_k, min_p   as for run; greedy without a temperature
  seed                without it, one that follows from custom_id
  stop                a text or a list of texts
  reasoning_effort    off (or none), low, high, max
  model               any name: the one model that is loaded answers, and the
                      result names it
  user, metadata      change nothing
  n, stream, logprobs, echo, best_of, tools, response_format, logit_bias,
  presence_penalty, frequency_penalty   only with the value that changes nothing
Any other field is an error of its line.

A line of OUT has id, custom_id, and response or error, the other null. error
has code, message and the line's number. ids follow from the line, the model and
the settings, and created is 0, so that OUT has the same lines however often the
run was stopped. To have a line with an error tried again, delete it from OUT.

Summary (--json): time in seconds, bytes of experts. tokens_per_s and
bytes_per_token count generated tokens; rows are tokens that went through the
model, of prompts and answers.

Exit status: 0 every line is answered, 1 error, 2 wrong usage, 3 done but some
lines have an error, 130 interrupted by Ctrl-C. After 1 and 130 the same command
goes on.";

pub const ROUTING_NOTES: &str = "\
Columns (--json fields):
  top tenth   top_tenth: share of the layer's reads that falls on the tenth of
              its experts that is read most
  repeat      share of a token's experts that the token before it, in the same
              text, used in this layer
  recall      share of a token's experts that are among as many (or twice as
              many) guessed from the layer before: its residual through this
              layer's router, without this layer's attention
  Layers are numbered from 0, as in the names of tensors.

N-gram drafts: the last 2 tokens are looked up in the text so far, newest
first, and up to 6 tokens that followed are the draft of a step, which adds one
token of its own. With --max-tokens the steps are those of what the model
added, otherwise those of the whole text.";

pub const COMPARE_NOTES: &str = "\
Figures (--json fields):
  loss        loss.difference: mean negative log-likelihood, in nats, of the tokens
              that follow another in a text, of the second side less that of the
              first; loss.perplexity_ratio is its exponential
  logits      largest_difference, rms_difference: of all logits after all tokens;
              divergence: mean Kullback-Leibler divergence of the second side's
              next-token probabilities from the first's, in nats;
              same_most_likely: share of tokens after which both sides find the
              same one most likely
  routes      same_sets: share of tokens and layers whose experts are all the same;
              same_experts: share of the experts that both sides chose;
              first_layer_that_differs: null where none does
Sums are f64 in a fixed order: the same settings on both sides give exactly 0.";

pub const SIZE_NOTES: &str =
    "Sizes: GB = 10^9 bytes; GiB and G = 2^30 bytes; likewise K, M, T; a plain number is bytes.";
