// Attention of decode steps, on a CPU with AVX512-BF16. All tensors are bfloat16 unless said otherwise.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "registers.h"

namespace {

constexpr int64_t kChunk = 256;  // keys per item of work in decode

// acc[g][i] += sum over keys of weights[g][key] * values[key][first + 16 * i ...], for G heads and 64
// numbers.
template <int G>
inline void weigh(const bf16* const* rows, int64_t first, int64_t count, const float* weights, float* out,
                  int64_t dim, int vecs) {
    __m512 acc[G][4];
    for (int g = 0; g < G; g++)
        for (int i = 0; i < 4; i++) acc[g][i] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const bf16* row = rows[j] + first;
        __m512 v[4];
        for (int i = 0; i < 4; i++) v[i] = i < vecs ? load_float(row + 16 * i) : _mm512_setzero_ps();
        for (int g = 0; g < G; g++) {
            __m512 p = _mm512_set1_ps(weights[g * kChunk + j]);
            for (int i = 0; i < 4; i++) acc[g][i] = _mm512_fmadd_ps(p, v[i], acc[g][i]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int i = 0; i < vecs; i++) _mm512_storeu_ps(out + g * dim + first + 16 * i, acc[g][i]);
}

// Up to kChunk keys that the query heads of one key-value head attend to, and a thread's buffers for them.
struct Chunk {
    const bf16 *keys[kChunk], *values[kChunk];
    int64_t count, group, dim;
    std::vector<float> weights;  // per head and key: a score, then its exponential
    std::vector<bf16> narrowed;  // with tiles: the weights of 16 heads, 0 for those that do not exist
    std::unique_ptr<bf16[]> query, packed;  // with tiles: queries and values

    Chunk(int64_t group, int64_t dim, bool tiles) : group(group), dim(dim), weights(group * kChunk) {
        if (!tiles) return;
        narrowed.resize(16 * kChunk);
        query.reset(new bf16[16 * dim]);
        packed.reset(new bf16[kChunk * dim]);
    }

    void score(const bf16* q, float scale) {
        for (int64_t j = count; j < (count + 15) / 16 * 16; j++) keys[j] = keys[count - 1];
        for (int64_t j = 0; j < count; j += 16)
            for (int64_t g = 0; g < group; g++) {
                __m512 acc[16];
                for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
                for (int64_t d = 0; d < dim; d += kLanes) {
                    __m512bh x = load_bf16(q + g * dim + d);
#pragma GCC unroll 16
                    for (int i = 0; i < 16; i++)
                        acc[i] = _mm512_dpbf16_ps(acc[i], x, load_bf16(keys[j + i] + d));
                }
                set_scores(g, j, sums(acc), scale);
            }
    }

    // The same by tiles. 16 keys lie `stride` apart, the first one's number in the chunk is a multiple of 16.
    void score_by_tiles(const bf16* q, float scale, int64_t stride) {
        const bf16* heads[16];
        for (int64_t g = 0; g < group; g++) heads[g] = q + g * dim;
        pack_columns(heads, group, query.get(), dim);
        finish_stores();
        int64_t bytes = stride * sizeof(bf16);
        for (int64_t j = 0; j < count; j += 32) {
            alignas(64) float columns[2][16][16];
            bool both = j + 16 < count;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < dim; d += kLanes) {
                _tile_loadd(4, query.get() + d * 16, kTileBytes);
                _tile_loadd(5, keys[j] + d, bytes);
                _tile_dpbf16ps(0, 5, 4);
                if (!both) continue;
                _tile_loadd(6, keys[j + 16] + d, bytes);
                _tile_dpbf16ps(1, 6, 4);
            }
            _tile_stored(0, columns[0], kTileBytes);
            _tile_stored(1, columns[1], kTileBytes);
            for (int half = 0; half <= both; half++) {
                __m512 y[16];
                for (int i = 0; i < 16; i++) y[i] = _mm512_load_ps(columns[half][i]);
                transpose(y);
                for (int64_t g = 0; g < group; g++) set_scores(g, j + 16 * half, y[g], scale);
            }
        }
    }

    void set_scores(int64_t g, int64_t j, __m512 products, float scale) {
        __m512 s = _mm512_mul_ps(products, _mm512_set1_ps(scale));
        s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), first16(count - j), s);
        _mm512_storeu_ps(weights.data() + g * kChunk + j, s);
    }

    // Turns scores into weights; `result` gets each head's maximum of the scores and sum of the weights.
    void soften(float* result) {
        for (int64_t g = 0; g < group; g++) {
            float* w = weights.data() + g * kChunk;
            __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
            for (int64_t j = 0; j < count; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(w + j));
            float m = _mm512_reduce_max_ps(most), shift = m == -INFINITY ? 0.0f : m;
            for (int64_t j = 0; j < count; j += 16) {
                __m512 e = exp_ps(_mm512_sub_ps(_mm512_loadu_ps(w + j), _mm512_set1_ps(shift)));
                e = _mm512_maskz_mov_ps(first16(count - j), e);
                sum = _mm512_add_ps(sum, e);
                _mm512_storeu_ps(w + j, e);
            }
            result[2 * g] = m;
            result[2 * g + 1] = _mm512_reduce_add_ps(sum);
        }
    }

    // Sets the heads' sums of weighted values, [group, dim].
    void weigh_values(float* result) const {
        for (int64_t d = 0; d < dim; d += 64) {
            int vecs = (int)std::min<int64_t>(4, (dim - d) / 16);
            for (int64_t g = 0; g < group; g += 4) {
                const float* w = weights.data() + g * kChunk;
                float* o = result + g * dim;
                switch (std::min<int64_t>(4, group - g)) {
                    case 4:
                        weigh<4>(values, d, count, w, o, dim, vecs);
                        break;
                    case 3:
                        weigh<3>(values, d, count, w, o, dim, vecs);
                        break;
                    case 2:
                        weigh<2>(values, d, count, w, o, dim, vecs);
                        break;
                    case 1:
                        weigh<1>(values, d, count, w, o, dim, vecs);
                        break;
                }
            }
        }
    }

    // The same by tiles; dim is a multiple of 64.
    void weigh_values_by_tiles(float* result) {
        int64_t end = (count + 31) / 32 * 32;
        for (int64_t j = 0; j < end; j += 16) {
            pack_values(values + j, std::min<int64_t>(16, count - j), packed.get() + j * dim, dim);
            for (int64_t g = 0; g < group; g++) {
                __m256i w = j < count ? narrow(_mm512_loadu_ps(weights.data() + g * kChunk + j)) : __m256i{};
                _mm256_storeu_si256((__m256i*)(narrowed.data() + g * kChunk + j), w);
            }
        }
        finish_stores();
        for (int64_t d = 0; d < dim; d += 64) {
            alignas(64) float sum[16][64];
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t j = 0; j < end; j += 32) {
                const bf16* v = packed.get() + j * dim + 2 * d;
                int64_t bytes = 2 * dim * sizeof(bf16);
                _tile_loadd(4, narrowed.data() + j, kChunk * sizeof(bf16));
                _tile_loadd(5, v, bytes);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, v + 32, bytes);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(5, v + 64, bytes);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, v + 96, bytes);
                _tile_dpbf16ps(3, 4, 6);
            }
            _tile_stored(0, sum[0], sizeof(sum[0]));
            _tile_stored(1, sum[0] + 16, sizeof(sum[0]));
            _tile_stored(2, sum[0] + 32, sizeof(sum[0]));
            _tile_stored(3, sum[0] + 48, sizeof(sum[0]));
            for (int64_t g = 0; g < group; g++) memcpy(result + g * dim + d, sum[g], sizeof(sum[g]));
        }
    }
};

}  // namespace

// queries [rows, heads, dim] (rows `q_stride` apart) attend to the keys of their sequences in the pool.
// `tiles`: this process may use AMX.
extern "C" void decode_attention(const bf16* query, int64_t q_stride, const bf16* keys, const bf16* values,
                                 const int32_t* table, int64_t table_stride, const int64_t* slots,
                                 const int32_t* lens, bf16* out, int64_t rows, int64_t heads,
                                 int64_t kv_heads, int64_t dim, int64_t page_size, int64_t page_rows,
                                 float scale, int tiles) {
    int64_t group = heads / kv_heads, width = kv_heads * dim, partial = group * (dim + 2);
    bool by_tiles = tiles && group <= 16 && dim % 64 == 0 && page_size % 16 == 0;
    std::vector<int64_t> begin(rows + 1);  // each row's first item of work per key-value head
    for (int64_t r = 0; r < rows; r++)
        begin[r + 1] = begin[r] + std::max<int64_t>(1, (lens[r] + kChunk - 1) / kChunk);
    std::vector<int32_t> owner(begin[rows]);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = begin[r]; i < begin[r + 1]; i++) owner[i] = r;
    // Per item and head: the weighted sum of values, the maximum of the scores, the sum of the weights.
    std::vector<float> partials(begin[rows] * kv_heads * partial);
#pragma omp parallel
    {
        Chunk chunk(group, dim, by_tiles);
        TileSession session(by_tiles);
#pragma omp for schedule(dynamic, 1)
        for (int64_t work = 0; work < begin[rows] * kv_heads; work++) {
            int64_t item = work / kv_heads, h = work % kv_heads, r = owner[item];
            int64_t first = (item - begin[r]) * kChunk, count = std::min(kChunk, lens[r] - first);
            float* result = partials.data() + work * partial;
            const int32_t* pages = table + slots[r] * table_stride;
            for (int64_t j = 0, token = first; j < count;) {
                int64_t row = pages[token / page_size] * page_rows + token % page_size;
                for (int64_t end = std::min(count, j + page_size - token % page_size); j < end;
                     j++, token++, row++) {
                    chunk.keys[j] = keys + row * width + h * dim;
                    chunk.values[j] = values + row * width + h * dim;
                    for (int64_t d = 0; d < dim; d += kLanes) {
                        _mm_prefetch((const char*)(chunk.keys[j] + d), _MM_HINT_T1);
                        _mm_prefetch((const char*)(chunk.values[j] + d), _MM_HINT_T1);
                    }
                }
            }
            chunk.count = count;
            const bf16* q = query + r * q_stride + h * group * dim;
            if (by_tiles)
                chunk.score_by_tiles(q, scale, width);
            else
                chunk.score(q, scale);
            chunk.soften(result + group * dim);
            if (by_tiles)
                chunk.weigh_values_by_tiles(result);
            else
                chunk.weigh_values(result);
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t head = 0; head < heads; head++) {
                int64_t h = head / group, g = head % group;
                auto of = [&](int64_t item) { return partials.data() + (item * kv_heads + h) * partial; };
                float most = -INFINITY, sum = 0;
                for (int64_t i = begin[r]; i < begin[r + 1]; i++)
                    most = std::max(most, of(i)[group * dim + 2 * g]);
                for (int64_t i = begin[r]; i < begin[r + 1]; i++)
                    sum += of(i)[group * dim + 2 * g + 1] * std::exp(of(i)[group * dim + 2 * g] - most);
                for (int64_t d = 0; d < dim; d += 16) {
                    __m512 acc = _mm512_setzero_ps();
                    for (int64_t i = begin[r]; i < begin[r + 1]; i++) {
                        float share =
                            begin[r + 1] - begin[r] == 1 ? 1 : std::exp(of(i)[group * dim + 2 * g] - most);
                        acc = _mm512_fmadd_ps(_mm512_set1_ps(share / sum),
                                              _mm512_loadu_ps(of(i) + g * dim + d), acc);
                    }
                    _mm256_storeu_si256((__m256i*)(out + (r * heads + head) * dim + d), narrow(acc));
                }
            }
    }
}
