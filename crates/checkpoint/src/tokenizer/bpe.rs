//! The merge table and the merge loop of byte-level BPE.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Token bytes by rank, and ranks by token bytes.
///
/// All bytes lie in one vector in rank order, so a vocabulary of 163,584 tokens costs about 4 MB: 1.2 MB of bytes,
/// 0.65 MB of ends and 2 MB of hash slots.
pub(super) struct Ranks {
    bytes: Vec<u8>,
    /// `ends[r]` is where the bytes of rank `r` end; they start where those of rank `r - 1` end.
    ends: Vec<u32>,
    /// Open addressing, linear probing, at most half full; a slot holds a rank or `EMPTY`.
    slots: Vec<u32>,
}

const EMPTY: u32 = u32::MAX;

impl Ranks {
    /// Builds the table from token bytes in rank order. Fails with the two ranks when two tokens are equal.
    ///
    /// The caller keeps the total below 2^32 bytes and the count below 2^31.
    pub(super) fn new<'a>(tokens: impl Iterator<Item = &'a [u8]>) -> Result<Ranks, (u32, u32)> {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for token in tokens {
            bytes.extend_from_slice(token);
            ends.push(bytes.len() as u32);
        }
        let slots = vec![EMPTY; (2 * ends.len()).next_power_of_two()];
        let mut ranks = Ranks { bytes, ends, slots };
        for rank in 0..ranks.len() {
            let slot = ranks.slot(ranks.token(rank).unwrap_or_default());
            match ranks.slots[slot] {
                EMPTY => ranks.slots[slot] = rank,
                earlier => return Err((earlier, rank)),
            }
        }
        Ok(ranks)
    }

    pub(super) fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    pub(super) fn token(&self, rank: u32) -> Option<&[u8]> {
        let end = *self.ends.get(rank as usize)?;
        let start = if rank == 0 { 0 } else { self.ends[rank as usize - 1] };
        Some(&self.bytes[start as usize..end as usize])
    }

    pub(super) fn rank(&self, token: &[u8]) -> Option<u32> {
        Some(self.slots[self.slot(token)]).filter(|&rank| rank != EMPTY)
    }

    /// The slot that holds `token`, or the empty one where it belongs.
    fn slot(&self, token: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = hash(token) as usize & mask;
        while self.slots[at] != EMPTY && self.token(self.slots[at]) != Some(token) {
            at = (at + 1) & mask;
        }
        at
    }
}

/// Multiply-and-rotate over 8-byte words. The table never grows with what a user sends, so no keyed hash is needed.
fn hash(token: &[u8]) -> u64 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15; // 2^64 / golden ratio
    let mut state = token.len() as u64;
    for word in token.chunks(8) {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        state = (state.rotate_left(23) ^ u64::from_le_bytes(padded)).wrapping_mul(ODD);
    }
    state ^ (state >> 32)
}

/// Encodes pieces. Holds the buffers of the merge loop, so that a text of many pieces allocates once.
#[derive(Default)]
pub(super) struct Merger {
    parts: Vec<Part>,
    /// Candidate merges, lowest rank first, leftmost on ties. May hold stale ones.
    heap: BinaryHeap<Reverse<(u32, u32)>>,
}

/// A token of the piece under way, at the byte where it starts. Bytes inside it keep a dead entry.
#[derive(Clone, Copy)]
struct Part {
    prev: u32,
    /// Where the next part starts; the piece's length for the last.
    next: u32,
    /// Rank of this part joined with the next one; `EMPTY` when there is no such token or the part is dead.
    joined: u32,
}

impl Merger {
    /// Appends the tokens of one piece: the whole piece where it is a token, else byte-pair merges, always the adjacent
    /// pair whose concatenation has the lowest rank and the leftmost of equal ones. Every single byte must be a token.
    ///
    /// Takes O(n log n) for n bytes. Pieces are at most 4 x 25,000 bytes long, far from `u32`.
    pub(super) fn encode(&mut self, ranks: &Ranks, piece: &[u8], ids: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        if let Some(rank) = ranks.rank(piece) {
            ids.push(rank);
            return;
        }
        let len = piece.len() as u32;
        self.heap.clear();
        self.parts.clear();
        self.parts.extend((0..len).map(|at| Part {
            prev: at.saturating_sub(1),
            next: at + 1,
            joined: EMPTY,
        }));
        for at in 0..len {
            self.offer(ranks, piece, at);
        }
        while let Some(Reverse((rank, at))) = self.heap.pop() {
            let left = self.parts[at as usize];
            // A stale candidate: the part has grown or died since. An equal rank means equal bytes, so it is not stale.
            if left.joined != rank {
                continue;
            }
            let right = left.next;
            let after = self.parts[right as usize].next;
            self.parts[right as usize].joined = EMPTY;
            self.parts[at as usize].next = after;
            if after < len {
                self.parts[after as usize].prev = at;
            }
            self.offer(ranks, piece, at);
            if at > 0 {
                self.offer(ranks, piece, left.prev);
            }
        }
        let mut at = 0;
        while at < len {
            let next = self.parts[at as usize].next;
            ids.extend(ranks.rank(&piece[at as usize..next as usize]));
            at = next;
        }
    }

    /// Finds out what the part at `at` makes with its right neighbour, and makes that a candidate.
    fn offer(&mut self, ranks: &Ranks, piece: &[u8], at: u32) {
        let next = self.parts[at as usize].next;
        let joined = match self.parts.get(next as usize) {
            Some(right) => ranks.rank(&piece[at as usize..right.next as usize]).unwrap_or(EMPTY),
            None => EMPTY,
        };
        self.parts[at as usize].joined = joined;
        if joined != EMPTY {
            self.heap.push(Reverse((joined, at)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule as it is stated, quadratic.
    fn plain(ranks: &Ranks, piece: &[u8]) -> Vec<u32> {
        if let Some(rank) = ranks.rank(piece) {
            return vec![rank];
        }
        let mut parts: Vec<Vec<u8>> = piece.iter().map(|&b| vec![b]).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let best = pairs.filter_map(|(i, pair)| Some((ranks.rank(&pair.concat())?, i)));
            let Some((_, i)) = best.min() else { break };
            let right = parts.remove(i + 1);
            parts[i].extend(right);
        }
        parts.iter().map(|part| ranks.rank(part).unwrap()).collect()
    }

    /// The 256 bytes, then `more` without repeats.
    fn table(more: &[Vec<u8>]) -> Ranks {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|b| vec![b]).collect();
        for token in more {
            if !tokens.contains(token) {
                tokens.push(token.clone());
            }
        }
        Ranks::new(tokens.iter().map(Vec::as_slice)).unwrap()
    }

    proptest! {
        #[test]
        fn merges_follow_the_rule(
            more in prop::collection::vec(prop::collection::vec(0u8..3, 2..7), 0..60),
            piece in prop::collection::vec(0u8..3, 0..80),
        ) {
            let ranks = table(&more);
            let mut ids = Vec::new();
            let mut merger = Merger::default();
            merger.encode(&ranks, &[2, 1, 0], &mut ids); // leaves something in the buffers
            ids.clear();
            merger.encode(&ranks, &piece, &mut ids);
            prop_assert_eq!(ids, if piece.is_empty() { vec![] } else { plain(&ranks, &piece) });
        }
    }

    #[test]
    fn every_token_is_found_and_nothing_else() {
        let tokens: Vec<Vec<u8>> = (0..5000u32)
            .map(|i| format!("{i}{}", "x".repeat(i as usize % 20)).into_bytes())
            .collect();
        let ranks = Ranks::new(tokens.iter().map(Vec::as_slice)).unwrap();
        for (rank, token) in tokens.iter().enumerate() {
            assert_eq!(ranks.rank(token), Some(rank as u32));
            assert_eq!(ranks.token(rank as u32), Some(token.as_slice()));
        }
        assert_eq!(ranks.rank(b"5000"), None);
        assert_eq!(ranks.rank(b""), None);
        assert_eq!(ranks.token(5000), None);
    }
    #[test]
    fn equal_tokens_are_refused() {
        let tokens: [&[u8]; 4] = [b"a", b"b", b"ab", b"b"];
        assert!(matches!(Ranks::new(tokens.into_iter()), Err((1, 3))));
    }
}
