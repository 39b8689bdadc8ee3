// Forward passes of a few rows through a decoder, for CPUs: weights in bfloat16 are read once, at the speed of memory.
//
// Everything heavy is one product, `gemm`: rows of bfloat16 times a matrix in tiles of 16 outputs, each tile holding pairs
// of inputs side by side, [outputs/16][inputs/2][16][2]. Keys and values are kept in that layout too, so attention is the
// same product twice. Threads walk through the phases of a whole pass together (see Walk).
//
// Each output is summed over its inputs in one order, however many rows and threads there are. So a row comes out the same
// to the last bit whether it is decoded alone or verified in a block, and greedy decoding with drafts cannot differ from
// plain decoding.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
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

// Part `index` of `parts` of `count` things, in order.
Range part(int count, int parts, int index) {
    return {int(int64_t(count) * index / parts), int(int64_t(count) * (index + 1) / parts)};
}

// Awake for a moment, because what is waited for is nearly there, then asleep, because it may need this very core.
template <class T>
void wait_while(std::atomic<T>& value, T unwanted, int looks = 4000) {
    for (int i = 0; i < looks; ++i) {
        if (value.load(std::memory_order_acquire) != unwanted) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == unwanted) value.wait(unwanted);
}

struct alignas(64) Phase {
    std::atomic<int> claimed{0}, done{0}, over{0};
};

// One thread's way through the phases of a pass. A phase is cut into pieces that threads claim one by one, and it is over
// when all are done. So a thread that another program keeps from running claims nothing and is waited for by nobody; fixed
// shares and barriers would wait for it at every phase, hundreds of times a pass.
class Walk {
    std::vector<Phase>& phases;
    size_t next = 0;

public:
    const int thread, threads;

    Walk(std::vector<Phase>& all, int me, int count) : phases(all), thread(me), threads(count) {}

    // work(index) for each index below `pieces`, by whichever thread; returns when all of it is done.
    template <class Work>
    void phase(int pieces, Work work) {
        Phase& here = phases[next++];
        for (int piece; (piece = here.claimed.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            work(piece);
            if (here.done.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) {
                here.over.store(1, std::memory_order_release);
                here.over.notify_all();
            }
        }
        if (pieces > 0) wait_while(here.over, 0);
    }

    // work(first, last) for `count` things in so many pieces a thread: one where the work is small against a claim.
    template <class Work>
    void split(int count, int each, Work work) {
        int pieces = std::min(count, threads == 1 ? 1 : each * threads);
        phase(pieces, [&](int piece) {
            Range mine = part(count, pieces, piece);
            work(mine.from, mine.to);
        });
    }
};

constexpr int PIECES = 2;  // of a product, a thread: measured; more cost more claims than they even out

struct Job {
    int threads;
    std::function<void(Walk&)> body;
    std::vector<Phase> phases;
};

constexpr int BETWEEN_PASSES = 20000;  // looks, some 200 µs: what a round does in Python between two passes

// The threads that help the caller of a pass. They never hold it up: a pass is over when its last phase is, and a helper
// that comes late finds every piece claimed. So a body may touch what its caller owns in pieces only.
class Crew {
    std::mutex door;
    std::shared_ptr<Job> job;
    std::atomic<uint32_t> posted{0};
    std::atomic<int> inside{0};
    int helpers = 0;

    void help(int me) {
        for (uint32_t seen = 0;;) {
            wait_while(posted, seen, BETWEEN_PASSES);
            std::shared_ptr<Job> mine;
            {
                std::lock_guard<std::mutex> lock(door);
                seen = posted.load();
                if (job && me < job->threads) mine = job;
                if (mine) ++inside;
            }
            if (!mine) continue;
            Walk walk(mine->phases, me, mine->threads);
            mine->body(walk);
            mine.reset();
            --inside;
        }
    }

public:
    void run(int threads, size_t phases, std::function<void(Walk&)> body) {
        auto mine = std::make_shared<Job>(Job{threads, std::move(body), std::vector<Phase>(phases)});
        {
            std::lock_guard<std::mutex> lock(door);
            for (; helpers < threads - 1; ++helpers) std::thread(&Crew::help, this, helpers + 1).detach();
            job = mine;
            ++posted;
        }
        posted.notify_all();
        Walk walk(mine->phases, 0, threads);
        mine->body(walk);
        std::lock_guard<std::mutex> lock(door);
        if (job == mine) job.reset();
    }

    void settle() {
        while (inside.load() > 0) std::this_thread::yield();
    }
};

// Never destroyed: its threads live as long as the process.
Crew& crew() {
    static Crew& only = *new Crew;
    return only;
}

constexpr int PHASES_A_LAYER = 9;  // a tap and the eight of Pass::run

struct Pass {
    const Model model;
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
    void norm(Walk& walk, const float* weight, int from_row = 0, float* wide = nullptr) {
        walk.split(rows - from_row, 1, [&](int first, int last) {
            std::vector<float> own(wide ? 0 : model.hidden);
            for (int m = from_row + first; m < from_row + last; ++m) {
                float* row = wide ? wide + size_t(m) * model.hidden : own.data();
                rms_norm(&x[size_t(m) * model.hidden], weight, model.hidden, model.eps, row);
                for (int i = 0; i < model.hidden; ++i) normed[size_t(m) * model.hidden + i] = narrow(row[i]);
            }
        });
    }

    // x += rows [rows, inputs] times tiles
    void add_product(Walk& walk, const std::vector<bf16>& in, int inputs, const bf16* w) {
        walk.split(model.hidden / TILE, PIECES, [&](int first, int last) {
            gemm(rows, in.data(), inputs, w, size_t(inputs) * TILE, inputs / 2, first, last, [&](int m, int n, floats sum) {
                float* at = &x[size_t(m) * model.hidden + n];
                store(at, load<floats>(at) + sum);
            });
        });
    }

    // Rows of normed inputs times the tiles of queries, keys and values from `from_tile` on.
    void project(Walk& walk, const Layer& layer, int from_tile) {
        int width = (model.heads + 2 * model.kv_heads) * model.head_dim;
        walk.split(width / TILE - from_tile, PIECES, [&](int first, int last) {
            gemm(rows, normed.data(), model.hidden, layer.qkv, size_t(model.hidden) * TILE, model.hidden / 2, from_tile + first,
                 from_tile + last, [&](int m, int n, floats sum) { store(&projected[size_t(m) * width + n], sum); });
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
    void attend(int thread, const Layer& layer, int kv, int first) {
        int size = model.head_dim, group = model.heads / model.kv_heads, all = rows * group;
        int count = std::min(8, all - first), length = start + rows, tiles = (length + TILE - 1) / TILE, width = tiles * TILE;
        float scale = 1.0f / std::sqrt(float(size)), total[8];
        auto& score = scores[thread];
        auto& weight = weights[thread];
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

    // Queries and keys are turned, values are kept as they are.
    void place(Walk& walk, const Layer& layer, int from_head) {
        int all = model.heads + 2 * model.kv_heads, count = all - from_head;
        walk.split(rows * count, 1, [&](int first, int last) {
            for (int i = first; i < last; ++i) {
                int m = i / count, head = from_head + i % count;
                if (head < model.heads + model.kv_heads) turn(layer, m, head);
                else keep_value(layer, m, head - model.heads - model.kv_heads);
            }
        });
    }

    // Keys and values of rows whose normed inputs are ready, for a draft's context: no queries, no attention.
    void remember(Walk& walk, const Layer& layer) {
        project(walk, layer, model.heads * model.head_dim / TILE);
        place(walk, layer, model.heads);
    }

    void run(Walk& walk, const Layer& layer) {
        int size = model.head_dim, blocks = (rows * (model.heads / model.kv_heads) + 7) / 8;
        norm(walk, layer.before_attention);
        project(walk, layer, 0);
        place(walk, layer, 0);
        walk.phase(model.kv_heads * blocks, [&](int i) { attend(walk.thread, layer, i / blocks, i % blocks * 8); });
        add_product(walk, mixed, model.heads * size, layer.out);
        norm(walk, layer.before_mlp);
        walk.split(model.inner / TILE, PIECES, [&](int first, int last) {
            size_t step = size_t(model.hidden) * TILE;
            for (int t = first; t < last; ++t)
                for (int m = 0; m < rows; m += 8) {
                    floats gate{};
                    rows_of<2>(std::min(8, rows - m), &normed[size_t(m) * model.hidden], model.hidden, layer.gate_up + t * step,
                               size_t(model.inner) * model.hidden, model.hidden / 2, [&](int i, int is_up, floats sum) {
                                   if (!is_up) gate = silu(sum);
                                   else store(&gated[size_t(m + i) * model.inner + t * TILE], narrow(gate * sum));
                               });
                }
        });
        add_product(walk, gated, model.inner, layer.down);
    }
};

}  // namespace

extern "C" {

// Appends `rows` tokens at position `start`: writes keys and values, the outputs of the layers `taps` (-1: the embedding)
// into features [rows, count·hidden], what lm_head sees into states [rows, hidden] unless null, and logits [rows or 1, vocab].
// The caller checks that everything fits.
void dspark_forward(const Model* model, const int64_t* tokens, int rows, int start, const int32_t* taps, int tap_count,
                    float* features, float* states, float* logits, int last_only) {
    auto pass = std::make_shared<Pass>(*model, rows, start);
    int hidden = model->hidden, vocab = model->vocab, first = last_only ? rows - 1 : 0;
    for (int m = 0; m < rows; ++m)
        for (int i = 0; i < hidden; ++i) pass->x[size_t(m) * hidden + i] = widen(model->embedding[tokens[m] * hidden + i]);
    crew().run(model->threads, model->layers * PHASES_A_LAYER + 3, [=](Walk& walk) {
        const Model& model = pass->model;
        auto tap = [&](int layer) {
            walk.phase(1, [&](int) {
                for (int t = 0; t < tap_count; ++t)
                    for (int m = 0; taps[t] == layer && m < rows; ++m)
                        std::copy_n(&pass->x[size_t(m) * hidden], hidden, features + (size_t(m) * tap_count + t) * hidden);
            });
        };
        for (int i = 0; i < model.layers; ++i) {
            tap(i - 1);
            pass->run(walk, model.layer[i]);
        }
        tap(model.layers - 1);
        pass->norm(walk, model.norm, first, states);
        const bf16* in = &pass->normed[size_t(first) * hidden];
        size_t step = size_t(hidden) * TILE;
        walk.split(vocab / TILE, 8, [&](int from, int to) {
            auto at = [&](int m, int n) { return logits + size_t(m) * vocab + n; };
            if (model.head)
                gemm(rows - first, in, hidden, model.head, step, hidden / 2, from, to,
                     [&](int m, int n, floats sum) { store(at(m, n), sum); });
            else
                gemm(rows - first, in, hidden, model.small_head, step, hidden / 2, from, to,
                     [&](int m, int n, floats sum) { store(at(m, n), sum * load<floats>(model.head_scale + n)); });
        });
    });
}

// A draft's context: features [rows, width] of positions start.. become keys and values of every layer.
void dspark_context(const Model* model, const float* features, int rows, int width, int start, const bf16* fuse,
                    const float* fuse_norm) {
    auto pass = std::make_shared<Pass>(*model, rows, start);
    auto input = std::make_shared<std::vector<bf16>>(size_t(rows) * width);
    for (size_t i = 0; i < input->size(); ++i) (*input)[i] = narrow(features[i]);
    crew().run(model->threads, model->layers * PHASES_A_LAYER + 2, [=](Walk& walk) {
        pass->add_product(walk, *input, width, fuse);
        pass->norm(walk, fuse_norm);
        for (int i = 0; i < pass->model.layers; ++i) pass->remember(walk, pass->model.layer[i]);
    });
}

// The sequential head: adds B_k = W1[x_{k-1}] W2 to row k of logits [rows, vocab] and takes the argmax, from left to right.
// w1 is [vocab, rank] and w2 in tiles. tokens[0] is the anchor; tokens[1..rows] are written.
void dspark_chain(const Model* model, const bf16* w1, const bf16* w2, int rank, int rows, float* logits, int64_t* tokens) {
    // The vocabulary is cut the same for any number of threads, and the first of equals wins: so does `argmax`.
    constexpr int CUTS = 16;
    struct Best {
        float value;
        int token;
    };
    auto found = std::make_shared<std::vector<Best>>(size_t(rows) * CUTS);
    int64_t anchor = tokens[0];
    int vocab = model->vocab;
    crew().run(model->threads, rows, [=](Walk& walk) {
        int64_t before = anchor;
        for (int k = 0; k < rows; ++k) {
            Best* best_of = &(*found)[size_t(k) * CUTS];
            walk.phase(CUTS, [&](int piece) {
                Range mine = part(vocab / TILE, CUTS, piece);
                float* row = logits + size_t(k) * vocab;
                floats best = splat(-INFINITY);
                ints at = {};
                const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
                gemm(1, w1 + before * rank, rank, w2, size_t(rank) * TILE, rank / 2, mine.from, mine.to,
                     [&](int, int n, floats bias) {
                         floats sum = load<floats>(row + n) + bias;
                         store(row + n, sum);
                         ints greater = sum > best;
                         at = greater ? lanes + n : at;
                         best = greater ? sum : best;
                     });
                Best& here = best_of[piece] = {-INFINITY, 0};
                for (int i = 0; i < TILE; ++i)
                    if (best[i] > here.value || (best[i] == here.value && at[i] < here.token)) here = {best[i], at[i]};
            });
            int first = 0;
            for (int piece = 1; piece < CUTS; ++piece)
                if (best_of[piece].value > best_of[first].value) first = piece;
            before = best_of[first].token;
            if (walk.thread == 0) tokens[k + 1] = before;  // thread 0 is the caller itself
        }
    });
}

// Returns when no helper reads a model any more, so that it can be freed.
void dspark_settle() { crew().settle(); }

}
