//! Experts that stay: a landed expert is kept by keeping its slot, so that nothing is copied.
//!
//! Which ones stay is decided by use. Each use of an expert counts, and counts half as much after a number of later uses; the cache
//! holds those that count most. A newcomer replaces the one that counts least only if it counts more itself. So a sweep through
//! more experts than fit, which is what every pass over many layers is, does not wash out what is used often, as it would
//! where the least recently used one goes.

use std::collections::{BTreeSet, HashMap};

use crate::arena::SlotLease;
use crate::layout::ExpertId;

/// A use counts half after this many rounds, a round being as many uses as there are experts in use: some 50 tokens where a token
/// uses a fiftieth of them. Long enough to tell what is used more often from what was used last.
const HALF_LIFE_ROUNDS: f64 = 8.0;

/// How much an expert counts: the logarithm to base 2 of the sum, over its uses, of two to the power of the use's time in half-lives.
/// Unlike the sum itself it cannot overflow, and it need not be changed as time passes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Score(f64);

impl Score {
    fn used_again(self, at: f64) -> Self {
        let (more, less) = (self.0.max(at), self.0.min(at));
        Self(more + (less - more).exp2().ln_1p() / std::f64::consts::LN_2)
    }
}

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A fixed number of slots with experts that were used, and how often every expert was.
#[derive(Debug)]
pub(crate) struct Cache {
    slots: usize,
    held: HashMap<ExpertId, SlotLease>,
    /// Those that are held, what counts least first.
    order: BTreeSet<(Score, ExpertId)>,
    scores: HashMap<ExpertId, Score>,
    /// Time in half-lives.
    now: f64,
}

impl Cache {
    /// An empty cache of so many slots.
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            slots,
            held: HashMap::new(),
            order: BTreeSet::new(),
            scores: HashMap::new(),
            now: 0.0,
        }
    }

    /// Number of experts held.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether an expert is held.
    pub(crate) fn holds(&self, expert: ExpertId) -> bool {
        self.held.contains_key(&expert)
    }

    /// The expert, if it is held. Does not count as a use.
    pub(crate) fn get(&self, expert: ExpertId) -> Option<SlotLease> {
        self.held.get(&expert).cloned()
    }

    /// Counts a use, and keeps the expert if it counts enough.
    pub(crate) fn used(&mut self, expert: ExpertId, lease: &SlotLease) {
        if self.slots == 0 {
            return;
        }
        self.now += 1.0 / (HALF_LIFE_ROUNDS * self.scores.len().max(1) as f64);
        let now = self.now;
        let before = self.scores.get(&expert).copied();
        let score = before.map_or(Score(now), |score| score.used_again(now));
        self.scores.insert(expert, score);
        if self.held.contains_key(&expert) {
            if let Some(before) = before {
                self.order.remove(&(before, expert));
            }
            self.order.insert((score, expert));
            return;
        }
        if self.held.len() == self.slots {
            // What somebody holds would keep its slot: then the cache's slots and the others' would be more than there are.
            let counts_less = self.order.iter().take_while(|(least, _)| *least < score);
            let mut idle = counts_less.filter(|(_, victim)| self.held.get(victim).is_some_and(SlotLease::is_only));
            let Some(&(least, victim)) = idle.next() else {
                return;
            };
            self.order.remove(&(least, victim));
            self.held.remove(&victim);
        }
        self.held.insert(expert, lease.clone());
        self.order.insert((score, expert));
    }

    /// Lets an expert go.
    pub(crate) fn forget(&mut self, expert: ExpertId) {
        if self.held.remove(&expert).is_some()
            && let Some(&score) = self.scores.get(&expert)
        {
            self.order.remove(&(score, expert));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;
    use crate::page::PAGE_BYTES;
    use std::sync::Arc;

    fn id(expert: u32) -> ExpertId {
        ExpertId { layer: 1, expert }
    }

    fn land(arena: &Arc<Arena>) -> SlotLease {
        let slot = arena.take().expect("a slot is free");
        let page = 0..PAGE_BYTES;
        slot.into_lease(Box::new([page]))
    }

    /// Uses experts one after the other; which of them were hits.
    fn run(cache: &mut Cache, arena: &Arc<Arena>, uses: &[u32]) -> Vec<bool> {
        let mut hits = vec![];
        for &expert in uses {
            let found = cache.get(id(expert));
            hits.push(found.is_some());
            let lease = found.unwrap_or_else(|| land(arena));
            cache.used(id(expert), &lease);
            assert!(cache.len() <= cache.slots);
        }
        assert_eq!(
            arena.slots() - arena.free_slots(),
            cache.len(),
            "each entry is one slot"
        );
        hits
    }

    #[test]
    fn what_is_used_most_survives_a_sweep() {
        let arena = Arena::new(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(2);
        let hits = run(&mut cache, &arena, &[7, 8, 7, 8, 7, 8]);
        assert_eq!(hits, [false, false, true, true, true, true]);
        let sweep: Vec<u32> = (10..30).collect();
        assert!(run(&mut cache, &arena, &sweep).iter().all(|hit| !hit));
        assert_eq!(run(&mut cache, &arena, &[7, 8]), [true, true]);
    }

    #[test]
    fn what_is_used_no_more_is_replaced() {
        let arena = Arena::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(1);
        run(&mut cache, &arena, &[1, 1, 1, 1]);
        let hits = run(&mut cache, &arena, &[2; 12]);
        assert!(!hits[0] && hits[11], "{hits:?}");
    }

    #[test]
    fn what_somebody_holds_is_not_replaced() {
        let arena = Arena::new(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(1);
        run(&mut cache, &arena, &[1]);
        let held = cache.get(id(1)).unwrap();
        run(&mut cache, &arena, &[2, 2, 2]);
        assert!(cache.holds(id(1)) && !cache.holds(id(2)));
        drop(held);
        run(&mut cache, &arena, &[2]);
        assert!(cache.holds(id(2)));
    }

    #[test]
    fn a_cache_of_no_slots_keeps_nothing() {
        let arena = Arena::new(PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(0);
        assert_eq!(run(&mut cache, &arena, &[1, 1]), [false, false]);
    }

    #[test]
    fn what_is_forgotten_is_read_again() {
        let arena = Arena::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(1);
        run(&mut cache, &arena, &[5, 5]);
        cache.forget(id(5));
        assert_eq!((cache.len(), arena.free_slots()), (0, 2));
        assert_eq!(run(&mut cache, &arena, &[5, 5]), [false, true]);
    }

    #[test]
    fn a_lease_outlives_its_entry() {
        let arena = Arena::new(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        let mut cache = Cache::new(1);
        let lease = land(&arena);
        cache.used(id(1), &lease);
        cache.forget(id(1));
        assert_eq!(arena.free_slots(), 1);
        drop(lease);
        assert_eq!(arena.free_slots(), 2);
    }
}
