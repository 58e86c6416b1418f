// One forward pass of a Llama-shaped decoder over a packed, ragged step.
#include <cstring>
#include <mutex>

#include "step.h"

using namespace ragspec;

extern "C" {

// Weights [outputs, inputs] row by row into panels of 64 outputs by 4 inputs. `packed` comes zeroed, padded to whole panels.
void ragspec_pack(const int8_t* weight, int32_t outputs, int32_t inputs, int8_t* packed) {
  for (int32_t output = 0; output < outputs; output++)
    for (int32_t input = 0; input < inputs; input++)
      packed[((size_t)(output / 64) * (inputs / 4) + input / 4) * 256 + output % 64 * 4 + input % 4] =
          weight[(size_t)output * inputs + input];
}

void ragspec_forward(const Model* model_pointer, const Step* step_pointer) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  const Model& model = *model_pointer;
  const Step& step = *step_pointer;
  const int tokens = step.tokens, threads = step.threads;
  const size_t layer_size = (size_t)step.slot_count * model.key_heads * step.capacity * model.head_dim;
  for (int i = 0; i < model.layer_count; i++) {
    const Layer& layer = model.layers[i];
    uint16_t *keys = step.keys + i * layer_size, *values = step.values + i * layer_size;
    normalize_quantize(layer.qkv, step.hidden, layer.attention_norm, model.epsilon, tokens, step.bytes, step.scales, threads);
    multiply(layer.qkv, step.bytes, step.scales, tokens, step.wide, false, threads);
    rotate_store(model, layer, step, keys, values);
    attend(model, layer, step, keys, values);
    quantize(layer.out, step.mixed, tokens, step.bytes, step.scales, threads);
    multiply(layer.out, step.bytes, step.scales, tokens, step.hidden, true, threads);
    normalize_quantize(layer.gate_up, step.hidden, layer.mlp_norm, model.epsilon, tokens, step.bytes, step.scales, threads);
    multiply(layer.gate_up, step.bytes, step.scales, tokens, step.wide, false, threads);
    gate_quantize(layer.down, step.wide, tokens, step.bytes, step.scales, threads);
    multiply(layer.down, step.bytes, step.scales, tokens, step.hidden, true, threads);
  }
  if (!step.wanted_count) return;
  for (int i = 0; i < step.wanted_count; i++)
    std::memcpy(step.states + (size_t)i * model.hidden, step.hidden + (size_t)step.wanted[i] * model.hidden,
                model.hidden * sizeof(float));
  normalize(step.states, model.final_norm, model.epsilon, step.wanted_count, model.hidden, step.states, threads);
  quantize(model.head, step.states, step.wanted_count, step.bytes, step.scales, threads);
  multiply(model.head, step.bytes, step.scales, step.wanted_count, step.logits, false, threads);
}

}
