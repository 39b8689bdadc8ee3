// Forward passes of a few rows through a decoder, for CPUs: weights in bfloat16 are read once, at the speed of memory.
//
// Everything heavy is one product, `gemm`: rows of bfloat16 times a matrix in tiles of 16 outputs, each tile holding pairs
// of inputs side by side, [outputs/16][inputs/2][16][2]. Keys and values are kept in that layout too, so attention is the
// same product twice. One parallel region spans all layers; threads meet at barriers.
//
// Each output is summed over its inputs in one order, however many rows and threads there are. So a row comes out the same
// to the last bit whether it is decoded alone or verified in a block, and greedy decoding with drafts cannot differ from
// plain decoding.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using bf16 = uint16_t;
typedef float floats __attribute__((vector_size(64)));      // 16 of them
typedef uint32_t words __attribute__((vector_size(64)));    // 16 pairs of bfloat16
typedef int32_t ints __attribute__((vector_size(64)));
typedef bf16 halves __attribute__((vector_size(32)));       // 16 bfloat16
constexpr int TILE = 16;
constexpr int LARGEST_HEAD = 512;
constexpr float UNSEEN = -1e30f;  // the score of a position that a row may not see
constexpr int AHEAD = 1024;  // weights to fetch before they are needed, 2 KiB: measured, hardware alone fetches too late

static inline floats splat(float value) { return floats{} + value; }

template <class T>
static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

static inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    return load<float>(&bits);
}

static inline bf16 narrow(float value) {  // to nearest, ties to even
    uint32_t bits = load<uint32_t>(&value);
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// sum + w·x for 16 outputs: two inputs of each.
static inline floats multiply(floats sum, words w, uint32_t x) {
#ifdef __AVX512BF16__
    return floats(_mm512_dpbf16_ps(__m512(sum), __m512bh(w), __m512bh(_mm512_set1_epi32(int(x)))));
#else
    uint32_t low = x << 16, high = x & 0xffff0000u;
    return sum + floats(w << 16) * load<float>(&low) + floats(w & 0xffff0000u) * load<float>(&high);
#endif
}

// 16 pairs of weights as bfloat16, which holds every int8 exactly.
static inline words fetch(const bf16* from) { return load<words>(from); }
static inline words fetch(const int8_t* from) {
#ifdef __AVX512BF16__
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from + TILE)));
    return words(_mm512_cvtne2ps_pbh(high, low));
#else
    words pairs;
    for (int i = 0; i < TILE; ++i) pairs[i] = narrow(float(from[2 * i])) | uint32_t(narrow(float(from[2 * i + 1]))) << 16;
    return pairs;
#endif
}

template <int ROWS, int TILES, class W, class Put>
static inline void block(const bf16* x, int x_step, const W* w, size_t w_step, int pairs, Put put) {
    floats sum[ROWS][TILES] = {};
    for (int k = 0; k < pairs; ++k) {
        words weight[TILES];
        for (int t = 0; t < TILES; ++t) {
            const W* here = w + t * w_step + size_t(k) * 2 * TILE;
            weight[t] = fetch(here);
            __builtin_prefetch(here + AHEAD);
        }
        for (int m = 0; m < ROWS; ++m) {
            uint32_t input = load<uint32_t>(x + size_t(m) * x_step + 2 * k);
            for (int t = 0; t < TILES; ++t) sum[m][t] = multiply(sum[m][t], weight[t], input);
        }
    }
    for (int m = 0; m < ROWS; ++m)
        for (int t = 0; t < TILES; ++t) put(m, t, sum[m][t]);
}

template <int TILES, class W, class Put>
static inline void rows_of(int rows, const bf16* x, int x_step, const W* w, size_t w_step, int pairs, Put put) {
    switch (rows) {
        case 1: return block<1, TILES>(x, x_step, w, w_step, pairs, put);
        case 2: return block<2, TILES>(x, x_step, w, w_step, pairs, put);
        case 3: return block<3, TILES>(x, x_step, w, w_step, pairs, put);
        case 4: return block<4, TILES>(x, x_step, w, w_step, pairs, put);
        case 5: return block<5, TILES>(x, x_step, w, w_step, pairs, put);
        case 6: return block<6, TILES>(x, x_step, w, w_step, pairs, put);
        case 7: return block<7, TILES>(x, x_step, w, w_step, pairs, put);
        default: return block<8, TILES>(x, x_step, w, w_step, pairs, put);
    }
}

// put(row, first output, 16 sums) for `rows` of x [rows, 2·pairs] times the tiles from..to-1 of w, whose tiles are w_step apart.
template <class W, class Put>
static inline void gemm(int rows, const bf16* x, int x_step, const W* w, size_t w_step, int pairs, int from, int to, Put put) {
    constexpr int SIDE = 3;  // 8 rows of 3 tiles: 24 of 32 registers hold sums
    for (int t = from; t < to;) {
        int width = to - t >= SIDE ? SIDE : 1;
        for (int m = 0; m < rows; m += 8) {
            auto put_here = [&](int i, int j, floats sum) { put(m + i, (t + j) * TILE, sum); };
            int count = std::min(8, rows - m);
            const bf16* xs = x + size_t(m) * x_step;
            const W* ws = w + size_t(t) * w_step;
            if (width == SIDE) rows_of<SIDE>(count, xs, x_step, ws, w_step, pairs, put_here);
            else rows_of<1>(count, xs, x_step, ws, w_step, pairs, put_here);
        }
        t += width;
    }
}

static inline halves narrow(floats value) {
    words bits = words(value);
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, halves);
}

template <class T, class V>
static inline void store(T* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

// e^x for x <= 0, to 1e-7 relative: 2^n times a polynomial for the fraction.
static inline floats exponential(floats x) {
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    floats scaled = x * 1.44269504f;
    ints whole = __builtin_convertvector(scaled - 0.5f, ints);  // truncates towards zero: x is never positive
    floats r = (scaled - __builtin_convertvector(whole, floats)) * 0.693147181f;
    floats p = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
    return p * floats((whole + 127) << 23);
}

static inline floats silu(floats x) {
    floats magnitude = x < splat(0.0f) ? x : -x;
    floats e = exponential(magnitude);
    return x < splat(0.0f) ? x * e / (1.0f + e) : x / (1.0f + e);
}

static void rms_norm(const float* x, const float* weight, int size, float eps, float* out) {
    floats sum = {};
    int i = 0;
    for (; i + TILE <= size; i += TILE) {
        floats v = load<floats>(x + i);
        sum += v * v;
    }
    float total = 0;
    for (int j = 0; j < TILE; ++j) total += sum[j];
    for (; i < size; ++i) total += x[i] * x[i];
    float scale = 1.0f / std::sqrt(total / size + eps);
    for (i = 0; i < size; ++i) out[i] = x[i] * scale * weight[i];
}

extern "C" {

struct Layer {
    const bf16 *qkv, *out, *gate_up, *down;  // tiles
    const float *before_attention, *before_mlp, *q_norm, *k_norm;  // the last two may be null
    bf16 *keys, *values;  // per kv head: keys [capacity/16][head_dim/2][16][2], values [head_dim/16][capacity/2][16][2]
};

struct Model {
    int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab, capacity, threads, causal;
    float eps;
    const Layer* layer;
    const bf16* embedding;                // [vocab, hidden]
    const float *cosine, *sine, *norm;    // [capacity, head_dim], the same with the first half's signs changed, [hidden]
    const bf16* head;                     // tiles, or null where lm_head is in int8:
    const int8_t* small_head;             // tiles
    const float* head_scale;              // [vocab]
};

}

namespace {

struct Range {
    int from, to;
};

// This thread's share of `count` things, in order.
Range share(int count) {
    int threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {int(int64_t(count) * me / threads), int(int64_t(count) * (me + 1) / threads)};
}

struct Pass {
    const Model& model;
    int rows, start;
    std::vector<float> x, projected;
    std::vector<bf16> normed, queries, mixed, gated;
    std::vector<std::vector<float>> scores;
    std::vector<std::vector<bf16>> weights;

    Pass(const Model& m, int n, int at) : model(m), rows(n), start(at) {
        int qkv = (m.heads + 2 * m.kv_heads) * m.head_dim;
        x.resize(size_t(n) * m.hidden);
        projected.resize(size_t(n) * qkv);
        normed.resize(size_t(n) * m.hidden);
        queries.resize(size_t(n) * m.heads * m.head_dim);
        mixed.resize(queries.size());
        gated.resize(size_t(n) * m.inner);
        scores.resize(m.threads);
        weights.resize(m.threads);
    }

    // normed = RMSNorm(x), also in float32 where `wide` asks for it.
    void norm(const float* weight, int from_row = 0, float* wide = nullptr) {
        Range mine = share(rows - from_row);
        std::vector<float> own(wide ? 0 : model.hidden);
        for (int m = from_row + mine.from; m < from_row + mine.to; ++m) {
            float* row = wide ? wide + size_t(m) * model.hidden : own.data();
            rms_norm(&x[size_t(m) * model.hidden], weight, model.hidden, model.eps, row);
            for (int i = 0; i < model.hidden; ++i) normed[size_t(m) * model.hidden + i] = narrow(row[i]);
        }
    }

    // x += rows [rows, inputs] times tiles
    void add_product(const std::vector<bf16>& in, int inputs, const bf16* w) {
        Range mine = share(model.hidden / TILE);
        gemm(rows, in.data(), inputs, w, size_t(inputs) * TILE, inputs / 2, mine.from, mine.to,
             [&](int m, int n, floats sum) {
                 float* at = &x[size_t(m) * model.hidden + n];
                 store(at, load<floats>(at) + sum);
             });
    }

    // One head of one row: norm, rotate, and put it where it belongs.
    void turn(const Layer& layer, int m, int head) {
        int size = model.head_dim, half = size / 2, at = start + m;
        const float* in = &projected[(size_t(m) * (model.heads + 2 * model.kv_heads) + head) * size];
        float normed_head[LARGEST_HEAD], turned[LARGEST_HEAD];
        bool query = head < model.heads;
        const float *weight = query ? layer.q_norm : layer.k_norm, *row = in;
        if (weight) {
            rms_norm(in, weight, size, model.eps, normed_head);
            row = normed_head;
        }
        const float *c = model.cosine + size_t(at) * size, *s = model.sine + size_t(at) * size;
        for (int i = 0; i < half; ++i) {
            turned[i] = row[i] * c[i] + row[i + half] * s[i];
            turned[i + half] = row[i + half] * c[i + half] + row[i] * s[i + half];
        }
        if (query) {
            int group = model.heads / model.kv_heads, kv = head / group;
            bf16* to = &queries[(size_t(kv) * rows * group + size_t(m) * group + head % group) * size];
            for (int i = 0; i < size; ++i) to[i] = narrow(turned[i]);
        } else {
            bf16* keys = layer.keys + size_t(head - model.heads) * model.capacity * size;
            bf16* tile = keys + size_t(at / TILE) * TILE * size + at % TILE * 2;
            for (int i = 0; i < size; ++i) tile[size_t(i / 2) * 2 * TILE + i % 2] = narrow(turned[i]);
        }
    }

    void keep_value(const Layer& layer, int m, int kv) {
        int size = model.head_dim, at = start + m;
        const float* in = &projected[(size_t(m) * (model.heads + 2 * model.kv_heads) + model.heads + model.kv_heads + kv) * size];
        bf16* values = layer.values + size_t(kv) * model.capacity * size;
        for (int i = 0; i < size; ++i)
            values[(size_t(i / TILE) * (model.capacity / 2) + at / 2) * 2 * TILE + i % TILE * 2 + at % 2] = narrow(in[i]);
    }

    // Up to 8 query rows from `first` on, of the heads that share key head `kv`.
    void attend(const Layer& layer, int kv, int first) {
        int size = model.head_dim, group = model.heads / model.kv_heads, all = rows * group;
        int count = std::min(8, all - first), length = start + rows, tiles = (length + TILE - 1) / TILE, width = tiles * TILE;
        float scale = 1.0f / std::sqrt(float(size)), total[8];
        auto& score = scores[omp_get_thread_num()];
        auto& weight = weights[omp_get_thread_num()];
        score.resize(std::max(score.size(), size_t(8) * width));
        weight.resize(std::max(weight.size(), size_t(8) * width));
        const bf16* q = &queries[(size_t(kv) * all + first) * size];
        gemm(count, q, size, layer.keys + size_t(kv) * model.capacity * size, size_t(size) * TILE, size / 2, 0, tiles,
             [&](int m, int n, floats sum) { store(&score[size_t(m) * width + n], sum * scale); });
        for (int m = 0; m < count; ++m) {
            int seen = model.causal ? start + (first + m) / group + 1 : length;
            float* s = &score[size_t(m) * width];
            bf16* p = &weight[size_t(m) * width];
            std::fill(s + seen, s + width, UNSEEN);
            floats highest = splat(UNSEEN), sum = {};
            for (int j = 0; j < width; j += TILE) {
                floats here = load<floats>(s + j);
                highest = here > highest ? here : highest;
            }
            float most = UNSEEN;
            for (int i = 0; i < TILE; ++i) most = std::max(most, highest[i]);
            for (int j = 0; j < width; j += TILE) {
                floats here = load<floats>(s + j);
                halves rounded = narrow(here > splat(UNSEEN) ? exponential(here - most) : floats{});
                store(p + j, rounded);
                sum += floats(__builtin_convertvector(rounded, words) << 16);
            }
            total[m] = 0;
            for (int i = 0; i < TILE; ++i) total[m] += sum[i];
        }
        gemm(count, weight.data(), width, layer.values + size_t(kv) * model.capacity * size, size_t(model.capacity) * TILE,
             (length + 1) / 2, 0, size / TILE, [&](int m, int n, floats sum) {
                 int row = (first + m) / group, head = kv * group + (first + m) % group;
                 store(&mixed[(size_t(row) * model.heads + head) * size + n], narrow(sum / total[m]));
             });
    }

    // Keys and values of rows whose normed inputs are ready, for a draft's context: no queries, no attention.
    void remember(const Layer& layer) {
        int size = model.head_dim, qkv = (model.heads + 2 * model.kv_heads) * size, kv = 2 * model.kv_heads;
        Range mine = share(kv * size / TILE);
        int first = model.heads * size / TILE;
        gemm(rows, normed.data(), model.hidden, layer.qkv, size_t(model.hidden) * TILE, model.hidden / 2, first + mine.from,
             first + mine.to, [&](int m, int n, floats sum) { store(&projected[size_t(m) * qkv + n], sum); });
#pragma omp barrier
        mine = share(rows * kv);
        for (int i = mine.from; i < mine.to; ++i) place(layer, i / kv, model.heads + i % kv);
#pragma omp barrier
    }

    // Queries and keys are turned, values are kept as they are.
    void place(const Layer& layer, int m, int head) {
        if (head < model.heads + model.kv_heads) turn(layer, m, head);
        else keep_value(layer, m, head - model.heads - model.kv_heads);
    }

    void run(const Layer& layer) {
        int size = model.head_dim, qkv = (model.heads + 2 * model.kv_heads) * size, group = model.heads / model.kv_heads;
        norm(layer.before_attention);
#pragma omp barrier
        Range mine = share(qkv / TILE);
        gemm(rows, normed.data(), model.hidden, layer.qkv, size_t(model.hidden) * TILE, model.hidden / 2, mine.from, mine.to,
             [&](int m, int n, floats sum) { store(&projected[size_t(m) * qkv + n], sum); });
#pragma omp barrier
        int heads = model.heads + 2 * model.kv_heads;
        mine = share(rows * heads);
        for (int i = mine.from; i < mine.to; ++i) place(layer, i / heads, i % heads);
#pragma omp barrier
        int blocks = (rows * group + 7) / 8;
        mine = share(model.kv_heads * blocks);
        for (int i = mine.from; i < mine.to; ++i) attend(layer, i / blocks, i % blocks * 8);
#pragma omp barrier
        add_product(mixed, model.heads * size, layer.out);
#pragma omp barrier
        norm(layer.before_mlp);
#pragma omp barrier
        mine = share(model.inner / TILE);
        size_t step = size_t(model.hidden) * TILE;
        for (int t = mine.from; t < mine.to; ++t)
            for (int m = 0; m < rows; m += 8) {
                floats gate{};
                rows_of<2>(std::min(8, rows - m), &normed[size_t(m) * model.hidden], model.hidden, layer.gate_up + t * step,
                           size_t(model.inner) * model.hidden, model.hidden / 2, [&](int i, int is_up, floats sum) {
                               if (!is_up) gate = silu(sum);
                               else store(&gated[size_t(m + i) * model.inner + t * TILE], narrow(gate * sum));
                           });
            }
#pragma omp barrier
        add_product(gated, model.inner, layer.down);
#pragma omp barrier
    }
};

}  // namespace

extern "C" {

// Appends `rows` tokens at position `start`: writes keys and values, the outputs of the layers `taps` (-1: the embedding)
// into features [rows, count·hidden], what lm_head sees into states [rows, hidden] unless null, and logits [rows or 1, vocab].
// The caller checks that everything fits.
void dspark_forward(const Model* model, const int64_t* tokens, int rows, int start, const int32_t* taps, int tap_count,
                    float* features, float* states, float* logits, int last_only) {
    Pass pass(*model, rows, start);
    int hidden = model->hidden;
    for (int m = 0; m < rows; ++m)
        for (int i = 0; i < hidden; ++i) pass.x[size_t(m) * hidden + i] = widen(model->embedding[tokens[m] * hidden + i]);
    auto tap = [&](int layer) {
        for (int t = 0; t < tap_count; ++t)
            if (taps[t] == layer) {
                Range mine = share(rows);
                for (int m = mine.from; m < mine.to; ++m)
                    std::copy_n(&pass.x[size_t(m) * hidden], hidden, features + (size_t(m) * tap_count + t) * hidden);
            }
    };
#pragma omp parallel num_threads(model->threads)
    {
        tap(-1);
        for (int i = 0; i < model->layers; ++i) {
            pass.run(model->layer[i]);
            tap(i);
        }
        int first = last_only ? rows - 1 : 0;
        pass.norm(model->norm, first, states);
#pragma omp barrier
        Range mine = share(model->vocab / TILE);
        const bf16* in = &pass.normed[size_t(first) * hidden];
        size_t step = size_t(hidden) * TILE, vocab = model->vocab;
        if (model->head)
            gemm(rows - first, in, hidden, model->head, step, hidden / 2, mine.from, mine.to,
                 [&](int m, int n, floats sum) { store(logits + m * vocab + n, sum); });
        else
            gemm(rows - first, in, hidden, model->small_head, step, hidden / 2, mine.from, mine.to,
                 [&](int m, int n, floats sum) { store(logits + m * vocab + n, sum * load<floats>(model->head_scale + n)); });
    }
}

// A draft's context: features [rows, width] of positions start.. become keys and values of every layer.
void dspark_context(const Model* model, const float* features, int rows, int width, int start, const bf16* fuse,
                    const float* fuse_norm) {
    Pass pass(*model, rows, start);
    std::vector<bf16> input(size_t(rows) * width);
#pragma omp parallel num_threads(model->threads)
    {
        Range mine = share(rows);
        for (size_t i = size_t(mine.from) * width; i < size_t(mine.to) * width; ++i) input[i] = narrow(features[i]);
#pragma omp barrier
        pass.add_product(input, width, fuse);
#pragma omp barrier
        pass.norm(fuse_norm);
#pragma omp barrier
        for (int i = 0; i < model->layers; ++i) pass.remember(model->layer[i]);
    }
}

// The sequential head: adds B_k = W1[x_{k-1}] W2 to row k of logits [rows, vocab] and takes the argmax, from left to right.
// w1 is [vocab, rank] and w2 in tiles. tokens[0] is the anchor; tokens[1..rows] are written.
void dspark_chain(const Model* model, const bf16* w1, const bf16* w2, int rank, int rows, float* logits, int64_t* tokens) {
    std::vector<float> most(model->threads);
    std::vector<int> where(model->threads);
#pragma omp parallel num_threads(model->threads)
    {
        int me = omp_get_thread_num();
        Range mine = share(model->vocab / TILE);
        for (int k = 0; k < rows; ++k) {
            float* row = logits + size_t(k) * model->vocab;
            floats best = splat(-INFINITY);
            ints at = {};
            const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            gemm(1, w1 + tokens[k] * rank, rank, w2, size_t(rank) * TILE, rank / 2, mine.from, mine.to, [&](int, int n, floats bias) {
                floats sum = load<floats>(row + n) + bias;
                store(row + n, sum);
                ints greater = sum > best;
                at = greater ? lanes + n : at;
                best = greater ? sum : best;
            });
            most[me] = -INFINITY;
            for (int i = 0; i < TILE; ++i)
                if (best[i] > most[me] || (best[i] == most[me] && at[i] < where[me])) most[me] = best[i], where[me] = at[i];
#pragma omp barrier
#pragma omp single
            {
                int winner = 0;
                for (int t = 1; t < omp_get_num_threads(); ++t)
                    if (most[t] > most[winner]) winner = t;
                tokens[k + 1] = where[winner];
            }
        }
    }
}

}
