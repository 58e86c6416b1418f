// One forward pass of a Llama-shaped decoder over a packed, ragged step.
#include <chrono>
#include <cstring>
#include <vector>

#include "crew.h"
#include "step.h"

using namespace ragspec;

namespace {

// Adds what has passed since the last lap to a kind of work, where anybody wants to know.
class Clock {
 public:
  explicit Clock(double* seconds) : seconds(seconds), last(now()) {}

  void lap(Phase phase) {
    if (!seconds) return;
    const auto time = now();
    seconds[(int)phase] += std::chrono::duration<double>(time - last).count();
    last = time;
  }

 private:
  static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

  double* seconds;
  std::chrono::steady_clock::time_point last;
};

// The wanted rows of [tokens, width], one behind the other.
void gather(const Step& step, const float* from, int width, float* to) {
  for (int i = 0; i < step.wanted_count; i++)
    std::memcpy(to + (size_t)i * width, from + (size_t)step.wanted[i] * width, width * sizeof(float));
}

}  // namespace

extern "C" {

// What Python must agree on: sizes of the structures, then constants.
void ragspec_layout(int32_t* out) {
  const int32_t layout[] = {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Segment), sizeof(Tile), sizeof(Step),
                            sizeof(Head), sizeof(Extras), sizeof(Chain), KEY_BLOCK, TILE_ROWS, MOST_HEAD_DIM, MOST_PARTS, MOST_INPUTS, (int32_t)Phase::count};
  std::memcpy(out, layout, sizeof layout);
}

// Weights [outputs, inputs] row by row into panels of 64 outputs by 4 inputs. `packed` comes zeroed, padded to whole panels.
void ragspec_pack(const int8_t* weight, int32_t outputs, int32_t inputs, int8_t* packed) {
  for (int32_t output = 0; output < outputs; output++)
    for (int32_t input = 0; input < inputs; input++)
      packed[((size_t)(output / 64) * (inputs / 4) + input / 4) * 256 + output % 64 * 4 + input % 4] =
          weight[(size_t)output * inputs + input];
}

void ragspec_forward(const Model* model_pointer, const Step* step_pointer) {
  const std::lock_guard<std::mutex> guard(crew_mutex);
  const Model& model = *model_pointer;
  const Step& step = *step_pointer;
  const int tokens = step.tokens, threads = step.threads;
  const size_t layer_size = (size_t)step.slot_count * model.key_heads * step.capacity * model.head_dim;
  Clock clock(step.seconds);
  std::vector<uint8_t> is_wanted(tokens);
  for (int i = 0; i < step.wanted_count; i++) is_wanted[step.wanted[i]] = 1;
  float* hidden = step.hidden;
  int rows = tokens;
  embed(model, step);
  for (int i = 0; i < model.layer_count; i++) {
    const Layer& layer = model.layers[i];
    const bool last = i == model.layer_count - 1;
    uint16_t *keys = step.keys + i * layer_size, *values = step.values + i * layer_size;
    normalize_quantize(layer.qkv, hidden, layer.attention_norm, model.epsilon, tokens, step.bytes, step.scales, threads);
    clock.lap(Phase::rows);
    multiply(layer.qkv, step.bytes, step.scales, tokens, step.wide, false, threads);
    clock.lap(Phase::products);
    encode_positions(model, layer, step, keys, values);
    clock.lap(Phase::rows);
    if (last && !step.wanted_count) return;
    attend(model, layer, step, keys, values, last ? is_wanted.data() : nullptr);
    clock.lap(Phase::attention);
    const float* mixed = step.mixed;
    if (last) {  // nobody reads the others: of most prompt tokens the last layer's keys and values are all that is needed
      gather(step, step.hidden, model.hidden, step.states);
      gather(step, step.mixed, layer.out.inputs, step.wide);
      hidden = step.states;
      mixed = step.wide;
      rows = step.wanted_count;
    }
    quantize(layer.out, mixed, rows, step.bytes, step.scales, threads);
    clock.lap(Phase::rows);
    multiply(layer.out, step.bytes, step.scales, rows, hidden, true, threads);
    clock.lap(Phase::products);
    normalize_quantize(layer.gate_up, hidden, layer.mlp_norm, model.epsilon, rows, step.bytes, step.scales, threads);
    clock.lap(Phase::rows);
    multiply(layer.gate_up, step.bytes, step.scales, rows, step.wide, false, threads);
    clock.lap(Phase::products);
    gate_quantize(layer.down, step.wide, rows, step.bytes, step.scales, threads);
    clock.lap(Phase::rows);
    multiply(layer.down, step.bytes, step.scales, rows, hidden, true, threads);
    clock.lap(Phase::products);
  }
  normalize(step.states, model.final_norm, model.epsilon, step.wanted_count, model.hidden, step.states, threads);
  quantize(model.head, step.states, step.wanted_count, step.bytes, step.scales, threads);
  multiply(model.head, step.bytes, step.scales, step.wanted_count, step.logits, false, threads);
  summarize(step.logits, step.wanted_count, model.head.outputs, model.vocabulary, step.choices, step.normalizers, threads);
  clock.lap(Phase::output);
}

}
