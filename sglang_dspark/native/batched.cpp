// Attention of many sequences, one row each, over caches of their own lengths: what batched generation needs and what
// padded attention wastes. Values are bfloat16 [slots][kv_heads][capacity][size]; keys are in tiles of 16 positions,
// [slots][kv_heads][capacity/16][size][16], so that a product gives 16 scores at once. Everything else is float.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using bf16 = uint16_t;
typedef float floats __attribute__((vector_size(64)));  // 16 of them
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32)));  // 16 bfloat16

constexpr int TILE = 16;

static inline floats widen(const bf16* from) {
    halves half;
    std::memcpy(&half, from, sizeof half);
    words wide = __builtin_convertvector(half, words) << 16;
    floats value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

static inline floats splat(float value) { return floats{} + value; }

// e^x for x <= 0, to a few units in the last place: 2^n times a polynomial in the rest.
static inline floats exponential(floats x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    const floats scaled = x * 1.44269504f;
    const ints n = __builtin_convertvector(scaled - 0.5f, ints);  // truncates towards 0, so this rounds
    const floats rest = (scaled - __builtin_convertvector(n, floats)) * 0.69314718f;
    floats p = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * rest + c;
    ints bits = (n + 127) << 23;
    floats power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

// One key head of one sequence: `group` query heads share its keys. SIZE is the head size in vectors of 16.
template <int SIZE>
static void attend(const float* q, const bf16* keys, const bf16* values, int group, int length, float scale,
                   std::vector<float>& scores, float* out) {
    const int tiles = (length + TILE - 1) / TILE;
    scores.resize(size_t(tiles) * TILE);
    for (int g = 0; g < group; g++, q += SIZE * TILE, out += SIZE * TILE) {
        floats tops = splat(-INFINITY);
        for (int tile = 0; tile < tiles; tile++) {
            floats even{}, odd{}, third{}, fourth{};  // so that no sum waits for the one before
            const bf16* k = keys + size_t(tile) * TILE * SIZE * TILE;
            for (int i = 0; i < SIZE * TILE; i += 4, k += 4 * TILE) {
                even += splat(q[i]) * widen(k);
                odd += splat(q[i + 1]) * widen(k + TILE);
                third += splat(q[i + 2]) * widen(k + 2 * TILE);
                fourth += splat(q[i + 3]) * widen(k + 3 * TILE);
            }
            floats here = (even + odd + third + fourth) * scale;
            for (int i = length - tile * TILE; i < TILE; i++) here[i] = -INFINITY;
            tops = here > tops ? here : tops;
            std::memcpy(&scores[size_t(tile) * TILE], &here, sizeof here);
        }
        float top = tops[0];
        for (int i = 1; i < TILE; i++) top = tops[i] > top ? tops[i] : top;
        floats totals{};
        for (int tile = 0; tile < tiles; tile++) {
            floats e;
            std::memcpy(&e, &scores[size_t(tile) * TILE], sizeof e);
            totals += e = exponential(e - top);
            std::memcpy(&scores[size_t(tile) * TILE], &e, sizeof e);
        }
        float total = 0;
        for (int i = 0; i < TILE; i++) total += totals[i];
        floats mixed[SIZE] = {};
        for (int at = 0; at < length; at++)
            for (int i = 0; i < SIZE; i++) mixed[i] += splat(scores[at]) * widen(values + (size_t(at) * SIZE + i) * TILE);
        for (int i = 0; i < SIZE; i++) mixed[i] /= total;
        std::memcpy(out, mixed, sizeof mixed);
    }
}

// q and out [slots][heads][size]; slot b attends to its first lengths[b] rows. Returns 0, or 1 for sizes that it lacks.
extern "C" int dspark_batched_attention(const float* q, const bf16* keys, const bf16* values, const int64_t* lengths,
                                        float* out, int slots, int heads, int kv_heads, int size, int64_t capacity) {
    if (size != 64 && size != 128 && size != 32) return 1;
    std::vector<float> scores;
    if (capacity % TILE) return 1;
    const int group = heads / kv_heads;
    const float scale = 1 / std::sqrt(float(size));
    for (int b = 0; b < slots; b++)
        for (int kv = 0; kv < kv_heads; kv++) {
            const size_t cache = (size_t(b) * kv_heads + kv) * capacity * size;
            const size_t row = (size_t(b) * heads + size_t(kv) * group) * size;
            auto run = size == 64 ? attend<4> : size == 128 ? attend<8> : attend<2>;
            run(q + row, keys + cache, values + cache, group, int(lengths[b]), scale, scores, out + row);
        }
    return 0;
}
