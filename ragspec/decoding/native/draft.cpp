// Drafts of a recurrent speculation head, on the kernels of the target's step.
#include <cmath>

#include "crew.h"
#include "step.h"

using namespace ragspec;

// Each row's likeliest next token and its probability, among the draft vocabulary and the sequence's own extras.
static void choose(const Head& head, const Chain& chain, int step) {
  summarize(chain.logits, chain.rows, head.output.outputs, head.draft_vocabulary, chain.choices, chain.normalizers, chain.threads);
  share_out(chain.threads, chain.rows, [&](int row) {
    const uint8_t* x = chain.bytes + (size_t)row * head.hidden;
    float top = chain.logits[(size_t)row * head.output.outputs + chain.choices[row]], normalizer = chain.normalizers[row];
    int32_t token = head.tokens[chain.choices[row]];
    const Extras& extras = chain.extras[row];
    for (int i = 0; i < extras.count; i++) {
      const int8_t* weight = extras.rows + (size_t)i * head.hidden;
      int32_t sum = -extras.zero[i];
      for (int k = 0; k < head.hidden; k++) sum += (int32_t)x[k] * weight[k];
      const float logit = sum * (extras.scale[i] * chain.scales[row]);
      const float high = std::fmax(normalizer, logit), low = std::fmin(normalizer, logit);
      normalizer = high + std::log1p(std::exp(low - high));
      if (logit > top) top = logit, token = extras.tokens[i];
    }
    chain.ids[row] = token;
    chain.drafted[(size_t)row * chain.steps + step] = token;
    chain.probabilities[(size_t)row * chain.steps + step] = std::exp(top - normalizer);
  });
}

extern "C" void ragspec_draft(const Head* head_pointer, const Chain* chain_pointer) {
  const std::lock_guard<std::mutex> guard(crew_mutex);
  const Head& head = *head_pointer;
  const Chain& chain = *chain_pointer;
  const int rows = chain.rows, threads = chain.threads;
  for (int row = 0; row < rows; row++) chain.survival[row] = 1.0f, chain.lengths[row] = 0;
  for (int step = 0; step < chain.steps; step++) {
    normalize_pair_quantize(head.gate_up, head, chain);
    multiply(head.gate_up, chain.bytes, chain.scales, rows, chain.wide, false, threads);
    gate_quantize(head.down, chain.wide, rows, chain.bytes, chain.scales, threads);
    multiply(head.down, chain.bytes, chain.scales, rows, chain.states, true, threads);
    normalize_quantize(head.output, chain.states, head.output_norm, head.epsilon, rows, chain.bytes, chain.scales, threads);
    multiply(head.output, chain.bytes, chain.scales, rows, chain.logits, false, threads);
    choose(head, chain, step);
    chain.lengths[rows] = step + 1;
    float promise = 0.0f;
    for (int row = 0; row < rows; row++) {
      if (chain.lengths[row] < step) continue;
      const float survival = chain.survival[row] * chain.probabilities[(size_t)row * chain.steps + step];
      chain.survival[row] = survival;
      if (!(survival >= chain.row_price)) continue;  // a NaN ends the draft, too
      chain.lengths[row] = step + 1;
      promise += survival - chain.row_price;
    }
    if (!(promise > 0.0f && promise >= chain.step_price)) break;
  }
}
