// One forward pass of a Llama-shaped decoder over a packed, ragged step.
#include <algorithm>
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

bool asked_for(const Step& step, int layer) {
  return std::count(step.feature_layers, step.feature_layers + step.feature_count, layer) > 0;
}

// Gives the states that enter a layer to whoever asked for them.
void give_features(const Step& step, int hidden, int layer) {
  for (int place = 0; place < step.feature_count; place++) {
    if (step.feature_layers[place] != layer) continue;
    for (int token = 0; token < step.tokens; token++)
      std::memcpy(step.features + ((size_t)token * step.feature_count + place) * hidden, step.hidden + (size_t)token * hidden,
                  hidden * sizeof(float));
  }
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
  // Of most prompt tokens the last layer's keys and values are all that is needed, unless somebody reads what leaves it.
  const bool all_leave = asked_for(step, model.layer_count);
  float* hidden = step.hidden;
  int rows = tokens;
  embed(model, step);
  for (int i = 0; i < model.layer_count; i++) {
    const Layer& layer = model.layers[i];
    const bool narrow = i == model.layer_count - 1 && !all_leave;
    uint16_t *keys = step.keys + i * layer_size, *values = step.values + i * layer_size;
    give_features(step, model.hidden, i);
    normalize_quantize(layer.qkv, hidden, layer.attention_norm, model.epsilon, tokens, step.bytes, step.scales, threads);
    clock.lap(Phase::rows);
    multiply(layer.qkv, step.bytes, step.scales, tokens, step.wide, false, threads);
    clock.lap(Phase::products);
    encode_positions(model, layer, step, keys, values);
    clock.lap(Phase::rows);
    if (narrow && !step.wanted_count) return;
    attend(model, layer, step, keys, values, narrow ? is_wanted.data() : nullptr);
    clock.lap(Phase::attention);
    const float* mixed = step.mixed;
    if (narrow) {
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
  if (all_leave) {
    give_features(step, model.hidden, model.layer_count);
    gather(step, step.hidden, model.hidden, step.states);
  }
  if (!step.wanted_count) return;
  normalize(step.states, model.final_norm, model.epsilon, step.wanted_count, model.hidden, step.states, threads);
  quantize(model.head, step.states, step.wanted_count, step.bytes, step.scales, threads);
  multiply(model.head, step.bytes, step.scales, step.wanted_count, step.logits, false, threads);
  summarize(step.logits, step.wanted_count, model.head.outputs, model.vocabulary, step.choices, step.normalizers, threads);
  clock.lap(Phase::output);
}

}
