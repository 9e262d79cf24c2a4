// Attention of prompts, on a CPU with AVX512-BF16. All tensors are bfloat16 unless said otherwise.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "registers.h"

namespace {

constexpr int64_t kQueries = 64, kKeys = 256;  // of a block of prefill

// Sums of products of kRegisterRows rows by 64 columns, which are four times 16.
constexpr int64_t kRegisterRows = 4;
struct Registers {
    __m512 acc[4][4];
    inline void clear() { *this = {}; }
    inline void load(const float* p, int64_t stride) {
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) acc[r][i] = _mm512_loadu_ps(p + r * stride + 16 * i);
    }
    inline void store(float* p, int64_t stride) const {
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < 4; i++) _mm512_storeu_ps(p + r * stride + 16 * i, acc[r][i]);
    }
    // Adds the sum over `pairs`, a multiple of 16: per pair, a row of `a` has two bfloat16 numbers, and `b`
    // two per column. The columns of part `i` begin at `b + i * b_column`.
    inline void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t b_column,
                         int64_t pairs) {
        for (int64_t p = 0; p < pairs; p++) {
            __m512bh y[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) y[i] = load_bf16(b + p * b_stride + i * b_column);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                int32_t two;
                memcpy(&two, a + r * a_stride + 2 * p, 4);
                __m512bh x = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], x, y[i]);
            }
        }
    }
};

// The same sum by tiles of AMX, for 32 rows and 32 columns; with `add` it is added to what is at `out`. Rows
// of `b` are `b_stride` apart within 16 pairs, and the next 16 pairs begin `b_step` later.
inline void multiply_by_tiles(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
                              int64_t b_column, int64_t b_step, int64_t pairs, bool add, float* out,
                              int64_t out_stride) {
    int64_t a_bytes = a_stride * sizeof(bf16), b_bytes = b_stride * sizeof(bf16),
            out_bytes = out_stride * sizeof(float);
    finish_stores();
    if (add) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + 16, out_bytes);
        _tile_loadd(2, out + 16 * out_stride, out_bytes);
        _tile_loadd(3, out + 16 * out_stride + 16, out_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t p = 0; p < pairs; p += 16, a += kLanes, b += b_step) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(5, a + 16 * a_stride, a_bytes);
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(7, b + b_column, b_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + 16, out_bytes);
    _tile_stored(2, out + 16 * out_stride, out_bytes);
    _tile_stored(3, out + 16 * out_stride + 16, out_bytes);
}

struct Heads {
    int64_t heads, dim;
    float scale;
    bool tiles;
};

// Buffers of one thread for a block of queries of one head.
struct Block {
    std::vector<float> scores, sum;
    std::vector<bf16> weights, q;
    float most[kQueries], total[kQueries];
    explicit Block(int64_t dim)
        : scores(kQueries * kKeys), sum(kQueries * dim), weights(kQueries * kKeys), q(kQueries * dim) {}

    // Queries `first_q` to `first_q + num_q - 1` of `head` attend; query i sees keys 0 to before + i.
    void attend(const bf16* query, int64_t q_stride, const bf16* k, const bf16* v, bf16* out, int64_t head,
                int64_t first_q, int64_t num_q, int64_t before, const Heads& s) {
        int64_t dim = s.dim, at_once = s.tiles ? 32 : kRegisterRows,
                rows = (num_q + at_once - 1) / at_once * at_once;
        for (int64_t r = 0; r < rows; r++)
            memcpy(q.data() + r * dim, query + (first_q + std::min(r, num_q - 1)) * q_stride + head * dim,
                   dim * sizeof(bf16));
        std::fill(sum.begin(), sum.end(), 0.0f);
        std::fill(most, most + kQueries, -INFINITY);
        std::fill(total, total + kQueries, 0.0f);
        int64_t end = before + first_q + num_q;  // the keys that the last query sees
        for (int64_t first = 0; first < end; first += kKeys) {
            int64_t num = std::min(kKeys, (end - first + 63) / 64 * 64);
            for (int64_t r = 0; r < rows; r += at_once) score(k + first * dim, r, num, s);
            for (int64_t r = 0; r < rows; r++)
                soften(r, num, before + first_q + std::min(r, num_q - 1) + 1 - first, s);
            for (int64_t r = 0; r < rows; r += at_once) add_values(v + first * dim, r, num, s);
        }
        for (int64_t r = 0; r < num_q; r++)
            for (int64_t d = 0; d < dim; d += 16)
                _mm256_storeu_si256((__m256i*)(out + ((first_q + r) * s.heads + head) * dim + d),
                                    narrow(_mm512_mul_ps(_mm512_loadu_ps(sum.data() + r * dim + d),
                                                         _mm512_set1_ps(1.0f / total[r]))));
    }

    // The scores of `num` keys, for a number of rows from `r` on: 32 with tiles, or else kRegisterRows.
    void score(const bf16* k, int64_t r, int64_t num, const Heads& s) {
        const bf16* rows = q.data() + r * s.dim;
        float* to = scores.data() + r * kKeys;
        if (s.tiles)
            for (int64_t j = 0; j < num; j += 32)
                multiply_by_tiles(rows, s.dim, k + j * s.dim, 32, 16 * s.dim, 16 * 32, s.dim / 2, false,
                                  to + j, kKeys);
        else
            for (int64_t j = 0; j < num; j += 64) {
                Registers t;
                t.clear();
                t.multiply(rows, s.dim, k + j * s.dim, 32, 16 * s.dim, s.dim / 2);
                t.store(to + j, kKeys);
            }
    }

    // Adds the weighted values of `num` keys, for as many rows from `r` on.
    void add_values(const bf16* v, int64_t r, int64_t num, const Heads& s) {
        const bf16* rows = weights.data() + r * kKeys;
        float* to = sum.data() + r * s.dim;
        if (s.tiles)
            for (int64_t d = 0; d < s.dim; d += 32)
                multiply_by_tiles(rows, kKeys, v + 2 * d, 2 * s.dim, 32, 32 * s.dim, num / 2, true, to + d,
                                  s.dim);
        else
            for (int64_t d = 0; d < s.dim; d += 64) {
                Registers t;
                t.load(to + d, s.dim);
                t.multiply(rows, kKeys, v + 2 * d, 2 * s.dim, 32, num / 2);
                t.store(to + d, s.dim);
            }
    }

    // One row's weights of `num` more keys, of which the first `visible` count; shrinks its sum if the
    // maximum grows.
    void soften(int64_t r, int64_t num, int64_t visible, const Heads& s) {
        float* row = scores.data() + r * kKeys;
        __m512 top = _mm512_set1_ps(-INFINITY);
        for (int64_t j = 0; j < num && j < visible; j += 16)
            top = _mm512_mask_max_ps(top, first16(visible - j), top, _mm512_loadu_ps(row + j));
        float next = std::max(most[r], _mm512_reduce_max_ps(top) * s.scale);
        float shrink = next == -INFINITY ? 1.0f : std::exp(most[r] - next);
        float shift = next == -INFINITY ? 0.0f : next;  // scores of -inf get weights of 0
        __m512 added = _mm512_setzero_ps();
        for (int64_t j = 0; j < num; j += 16) {
            __m512 e = _mm512_setzero_ps();
            if (j < visible) {
                e = exp_ps(_mm512_fmsub_ps(_mm512_loadu_ps(row + j), _mm512_set1_ps(s.scale),
                                           _mm512_set1_ps(shift)));
                e = _mm512_maskz_mov_ps(first16(visible - j), e);
                added = _mm512_add_ps(added, e);
            }
            _mm256_storeu_si256((__m256i*)(weights.data() + r * kKeys + j), narrow(e));
        }
        total[r] = total[r] * shrink + _mm512_reduce_add_ps(added);
        most[r] = next;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < s.dim; d += 16)
                _mm512_storeu_ps(
                    sum.data() + r * s.dim + d,
                    _mm512_mul_ps(_mm512_loadu_ps(sum.data() + r * s.dim + d), _mm512_set1_ps(shrink)));
    }
};

}  // namespace

// Sequences `first` to `last - 1`: the tokens of sequence i are q_starts[i] to q_starts[i + 1] - 1, the last
// ones of its kv_lens[i] tokens. A query's bits depend on its own sequence up to its own token alone, as long
// as the values of later tokens are finite: these have weights of 0. dim is a multiple of 64. `tiles`: this
// process may use AMX.
extern "C" void prefill_attention(const bf16* query, int64_t q_stride, const bf16* keys, const bf16* values,
                                  const int32_t* table, int64_t table_stride, const int64_t* slots,
                                  const int32_t* q_starts, const int32_t* kv_lens, bf16* out, int64_t first,
                                  int64_t last, int64_t heads, int64_t kv_heads, int64_t dim,
                                  int64_t page_size, int64_t page_rows, float scale, int tiles) {
    Heads sizes{heads, dim, scale, tiles != 0};
    int64_t width = kv_heads * dim, longest = 0;
    for (int64_t i = first; i < last; i++) longest = std::max<int64_t>(longest, (kv_lens[i] + 63) / 64 * 64);
    std::unique_ptr<bf16[]> packed_keys(new bf16[longest * width]), packed_values(new bf16[longest * width]);
#pragma omp parallel
    {
        Block block(dim);
        TileSession session(sizes.tiles);
        for (int64_t i = first; i < last; i++) {
            int64_t kv_len = kv_lens[i], padded = (kv_len + 63) / 64 * 64,
                    blind = std::max<int64_t>(0, q_starts[i + 1] - q_starts[i] - kv_len);
            int64_t start = q_starts[i] + blind, q_len = q_starts[i + 1] - start;
            const int32_t* pages = table + slots[i] * table_stride;
            const bf16* q = query + start * q_stride;
            bf16* o = out + start * heads * dim;
#pragma omp single
            memset((void*)(out + q_starts[i] * heads * dim), 0, blind * heads * dim * sizeof(bf16));
#pragma omp for schedule(static)
            for (int64_t work = 0; work < kv_heads * padded / 16; work++) {
                int64_t h = work / (padded / 16), at = work % (padded / 16) * 16,
                        count = std::max<int64_t>(0, std::min<int64_t>(16, kv_len - at));
                const bf16 *key_rows[16], *value_rows[16];
                for (int64_t j = 0; j < count; j++) {
                    int64_t row = pages[(at + j) / page_size] * page_rows + (at + j) % page_size;
                    key_rows[j] = keys + row * width + h * dim;
                    value_rows[j] = values + row * width + h * dim;
                }
                pack_columns(key_rows, count, packed_keys.get() + (h * padded + at) * dim, dim);
                pack_values(value_rows, count, packed_values.get() + (h * padded + at) * dim, dim);
            }
            int64_t blocks = (q_len + kQueries - 1) / kQueries;
#pragma omp for schedule(dynamic, 1)
            for (int64_t work = 0; work < heads * blocks; work++) {  // the longest blocks first
                int64_t head = work % heads, first_q = (blocks - 1 - work / heads) * kQueries,
                        at = head / (heads / kv_heads) * padded * dim;
                block.attend(q, q_stride, packed_keys.get() + at, packed_values.get() + at, o, head, first_q,
                             std::min(kQueries, q_len - first_q), kv_len - q_len, sizes);
            }
        }
    }
}
