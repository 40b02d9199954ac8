//! Budgets first: what the memory is divided among, decided before anything large is taken.

use crate::error::Error;
use crate::trunk::{TrunkFormat, int8_bytes, is_converted};
use checkpoint::{Class, K3Config, Schema};
use drives::PAGE_BYTES;
use kernels::KvFormat;
use models::kimi_k3::{LOGIT_ROWS, Workspace, state_bytes, token_bytes};
use std::fmt;
use sysinfo::{ProcessRefreshKind, ProcessesToUpdate};

/// The least that is left to the rest of the machine when no budget is given, and the share of what is available.
pub const RESERVE_BYTES: u64 = 2 << 30;
/// One part in this many of the available memory is left to the rest of the machine, if that is more.
pub const RESERVE_SHARE: u64 = 10;
/// Code, thread stacks and small tables.
const PROGRAM_BYTES: u64 = 48 << 20;
/// A vocabulary entry in the tokenizer's tables.
const VOCABULARY_ENTRY_BYTES: u64 = 192;
/// An expert's place in the checkpoint's and the layout's tables.
const EXPERT_ENTRY_BYTES: u64 = 256;
/// Most rows of one pass. At K3's size a row costs some 2 MB of activations.
pub const MAX_PASS_ROWS: usize = 2048;
/// Rows that a pass gets before sequences get memory, where wished for. At K3's size they read nearly every expert, see
/// [`expected_experts`](crate::expected_experts), for about the memory of two sequences.
const GOOD_PASS_ROWS: usize = 512;
/// Slots beyond this do not make reads faster.
const MOST_SLOTS: usize = 64;

/// What is asked of the memory.
#[derive(Clone, Debug)]
pub struct Wishes {
    /// Bytes in all.
    pub budget: u64,
    /// Positions that a sequence may reach.
    pub positions: usize,
    /// Sequences that are useful at one time; as many as fit get memory, at least one.
    pub sequences: usize,
    /// Rows of the largest pass that would be useful.
    pub pass_rows: usize,
    /// Whether the logits of every row of a pass are wanted at once.
    pub all_logits: bool,
    /// Slots, where the caller decides (tests, experiments).
    pub slots: Option<usize>,
    /// Compute threads.
    pub threads: usize,
    /// How latents are stored.
    pub kv: KvFormat,
    /// How the resident matrices are stored.
    pub trunk: TrunkFormat,
    /// Most bytes in which experts stay; by default what is left of the budget.
    pub cache: Option<u64>,
}

/// How the memory is divided. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// What was given.
    pub budget: u64,
    /// Code and tables.
    pub program: u64,
    /// Resident weights, as stored.
    pub trunk: u64,
    /// State of all sequences at their longest.
    pub state: u64,
    /// Activations of a pass, results of experts in flight among them.
    pub pass: u64,
    /// Slots that experts land in.
    pub slots: u64,
    /// Slots in which experts stay after their use.
    pub cache: u64,
    /// Positions that a sequence's state has room for.
    pub positions: usize,
    /// How latents are stored.
    pub kv: KvFormat,
    /// How the resident matrices are stored.
    pub trunk_format: TrunkFormat,
    /// Bytes that a token of context takes.
    pub token: u64,
    /// Sequences that the state has room for.
    pub sequences: usize,
    /// Rows of the largest pass.
    pub pass_rows: usize,
    /// Number of slots that experts land in.
    pub slot_count: usize,
    /// Number of slots in which experts stay.
    pub cache_slots: usize,
}

impl MemoryPlan {
    /// Divides the budget, or says what would be enough. The files need not be there: configuration and schema suffice,
    /// with the bytes of a slot, for which there is [`most_slot_bytes`].
    ///
    /// One sequence and the slots that one row needs come first; then passes grow to 512 rows, sequences to as many as are
    /// wished for, each with a row in a pass, and passes and slots again as far as they fit. The cache gets the rest.
    pub fn new(c: &K3Config, schema: &Schema, slot_bytes: u64, wishes: &Wishes) -> Result<Self, Error> {
        let least_slots = least_slots(wishes);
        let most_slots = wishes.slots.unwrap_or(c.num_experts.min(MOST_SLOTS)).max(1);
        let good_slots = c.num_experts_per_token.clamp(least_slots, most_slots);
        let fixed = Self::least(c, schema, slot_bytes, wishes);
        let state = state_bytes(c, wishes.positions, wishes.kv);
        let plan = |sequences: usize, rows: usize, slots: usize| Self {
            state: sequences as u64 * state,
            pass: pass_bytes(c, rows, sequences, wishes),
            slots: slots as u64 * slot_bytes,
            sequences,
            pass_rows: rows,
            slot_count: slots,
            ..fixed.clone()
        };
        let least = &fixed;
        if least.total() > wishes.budget {
            return Err(Error::Memory {
                budget: wishes.budget,
                needed: least.total(),
                table: least.parts().map(|(name, bytes)| format!("{name} {bytes}")).join(", "),
                hint: match Self::most_positions(c, schema, slot_bytes, wishes) {
                    0 => String::new(),
                    fit => format!(
                        " or shorten the context of {} tokens, of which {fit} fit",
                        wishes.positions
                    ),
                },
            });
        }
        let fits = |sequences, rows, slots| plan(sequences, rows, slots).total() <= wishes.budget;
        let most_rows = wishes.pass_rows.clamp(1, MAX_PASS_ROWS);
        let rows = largest(1, most_rows.min(GOOD_PASS_ROWS), |rows| fits(1, rows, good_slots));
        let sequences = largest(1, wishes.sequences.min(most_rows), |sequences| {
            fits(sequences, rows.max(sequences), good_slots)
        });
        let rows = largest(rows.max(sequences), most_rows, |rows| fits(sequences, rows, good_slots));
        let slots = largest(least_slots, most_slots, |slots| fits(sequences, rows, slots));
        let mut plan = plan(sequences, rows, slots);
        let left = (wishes.budget - plan.total()).min(wishes.cache.unwrap_or(u64::MAX));
        let experts = (c.moe_layers() * c.num_experts) as u64;
        plan.cache_slots = (left / slot_bytes).min(experts) as usize;
        plan.cache = plan.cache_slots as u64 * slot_bytes;
        Ok(plan)
    }

    /// The least that runs at all: one sequence, passes of one row, and one slot unless more are wished for. It may exceed the budget.
    pub fn least(c: &K3Config, schema: &Schema, slot_bytes: u64, wishes: &Wishes) -> Self {
        let tables =
            c.vocab_size as u64 * VOCABULARY_ENTRY_BYTES + (c.moe_layers() * c.num_experts) as u64 * EXPERT_ENTRY_BYTES;
        let slots = least_slots(wishes);
        Self {
            budget: wishes.budget,
            program: PROGRAM_BYTES + tables,
            trunk: trunk_bytes(schema, wishes.trunk),
            state: state_bytes(c, wishes.positions, wishes.kv),
            sequences: 1,
            pass: pass_bytes(c, 1, 1, wishes),
            slots: slots as u64 * slot_bytes,
            cache: 0,
            cache_slots: 0,
            positions: wishes.positions,
            kv: wishes.kv,
            trunk_format: wishes.trunk,
            token: token_bytes(c, wishes.kv),
            pass_rows: 1,
            slot_count: slots,
        }
    }

    /// Tokens of context that fit the budget at most, with the least of everything else; up to what the model allows, and 0
    /// where nothing fits. `wishes.positions` does not matter.
    pub fn most_positions(c: &K3Config, schema: &Schema, slot_bytes: u64, wishes: &Wishes) -> usize {
        largest(0, c.max_position_embeddings, |positions| {
            let wishes = Wishes {
                positions,
                ..wishes.clone()
            };
            Self::least(c, schema, slot_bytes, &wishes).total() <= wishes.budget
        })
    }

    /// Bytes of all parts.
    pub fn total(&self) -> u64 {
        self.program + self.trunk + self.state + self.pass + self.slots + self.cache
    }

    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, u64); 6] {
        [
            ("program", self.program),
            ("trunk", self.trunk),
            ("state", self.state),
            ("pass", self.pass),
            ("slots", self.slots),
            ("cache", self.cache),
        ]
    }
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let note = |name| match name {
            "program" => "code and tables".to_owned(),
            "trunk" => format!("resident weights ({})", self.trunk_format.label()),
            "state" => format!(
                "{} sequence(s) of up to {} tokens, {} bytes a token (latents in {})",
                self.sequences, self.positions, self.token, self.kv
            ),
            "pass" => format!("activations and expert results of up to {} rows", self.pass_rows),
            "slots" => format!("{} experts in flight", self.slot_count),
            _ => format!("{} experts that stay", self.cache_slots),
        };
        for (name, bytes) in self.parts() {
            writeln!(f, "  {name:8} {:>12}  {}", human(bytes), note(name))?;
        }
        writeln!(
            f,
            "  {:8} {:>12}  of {} given",
            "in all",
            human(self.total()),
            human(self.budget)
        )
    }
}

fn least_slots(wishes: &Wishes) -> usize {
    wishes.slots.unwrap_or(1).max(1)
}

/// Bytes of a slot for an expert of `expert_bytes` bytes in `extents` pieces, wherever in the pages these begin.
pub fn most_slot_bytes(expert_bytes: u64, extents: u64) -> u64 {
    let page = PAGE_BYTES as u64;
    // A piece touches at most one page more than it would when it began with one, and pages are whole.
    (expert_bytes + extents * (page - 1)).next_multiple_of(page) + (extents.max(1) - 1) * page
}

/// The largest number from `low` to `high` that fits; `low` is taken to fit. Needs grow with the number.
fn largest(low: usize, high: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (low, high.max(low));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Bytes of the resident weights in memory: matrices as stored, in whole pages; vectors as f32.
pub fn trunk_bytes(schema: &Schema, format: TrunkFormat) -> u64 {
    let resident = schema.trunk().iter().filter(|spec| spec.class != Class::Embedding);
    resident
        .map(|spec| match is_matrix(spec.shape.dims()) {
            true if format == TrunkFormat::Int8 && is_converted(spec) => {
                let dims = spec.shape.dims();
                int8_bytes(dims[0], dims[1]).next_multiple_of(PAGE_BYTES as u64)
            }
            true => spec.bytes().next_multiple_of(PAGE_BYTES as u64) + PAGE_BYTES as u64,
            false => 4 * spec.shape.dims().iter().product::<u64>(),
        })
        .sum()
}

/// Whether a tensor stays as stored (a matrix) or is expanded to f32 (norms, biases, taps, pseudo-queries).
fn is_matrix(dims: &[u64]) -> bool {
    matches!(dims, [rows, _] if *rows > 1)
}

fn pass_bytes(c: &K3Config, rows: usize, sequences: usize, wishes: &Wishes) -> u64 {
    // Those that are returned, and those that are computed together.
    let returned = if wishes.all_logits { rows } else { sequences.min(rows) };
    let wanted = returned + returned.min(LOGIT_ROWS);
    let logits = (wanted * c.vocab_size * 4) as u64;
    let embeddings = (rows * (c.hidden_size * 2 + PAGE_BYTES)) as u64;
    Workspace::bytes(c, rows) + Workspace::scratch_bytes(c, rows, wishes.threads) + logits + embeddings
}

/// A size for people: powers of 1024, three digits.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!(
            "{value:.*} {}",
            if value < 10.0 { 2 } else { usize::from(value < 100.0) },
            UNITS[unit]
        ),
    }
}

/// The budget when none is given: available memory, the limit of this process's control group included, less the larger
/// of [`RESERVE_BYTES`] and one part in [`RESERVE_SHARE`]. 0 where the system does not tell.
pub fn default_budget() -> u64 {
    let available = available_bytes().unwrap_or(0);
    available.saturating_sub(RESERVE_BYTES.max(available / RESERVE_SHARE))
}

/// The available memory at which [`default_budget`] is `budget` or more, in bytes.
pub fn available_for_budget(budget: u64) -> u64 {
    // An upper bound: less by at most RESERVE_SHARE bytes would do.
    (budget + RESERVE_BYTES).max(budget + budget / (RESERVE_SHARE - 1) + 1)
}

fn available_bytes() -> Option<u64> {
    let mut system = sysinfo::System::new().ok()?;
    system.refresh_memory();
    let pid = sysinfo::get_current_pid().ok()?;
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[pid]), false, ProcessRefreshKind::nothing());
    let limits = system.process(pid).and_then(sysinfo::Process::cgroup_limits);
    Some(
        limits
            .map_or(u64::MAX, |l| l.free_memory)
            .min(system.available_memory()),
    )
}

/// Most bytes of memory that this process ever held, where the system tells.
pub fn peak_bytes() -> Option<u64> {
    // Linux. getrusage would also count what the parent held before it started this program.
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        assert_eq!(human(999), "999 B");
        assert_eq!(human(17_547_264), "16.7 MiB");
        assert_eq!(human(113_509_540_864), "106 GiB");
        assert_eq!(human(5 << 30), "5.00 GiB");
    }

    #[test]
    fn the_largest_that_fits() {
        assert_eq!(largest(1, 100, |n| n <= 37), 37);
        assert_eq!(largest(1, 100, |_| true), 100);
        assert_eq!(largest(1, 100, |_| false), 1);
        assert_eq!(largest(5, 2, |_| true), 5);
    }

    #[test]
    fn a_slot_holds_an_expert_wherever_it_begins() {
        let page = PAGE_BYTES as u64;
        let pages = |offset: u64, len: u64| (offset % page + len).next_multiple_of(page);
        for len in [1, 2, 4095, 4096, 4097, 8192, 17_547_264] {
            let worst = (0..page).map(|offset| pages(offset, len)).max();
            assert_eq!(Some(most_slot_bytes(len, 1)), worst, "{len}");
        }
        // Two pieces, cut and placed anyhow.
        for (first, second) in [(1, 1), (4096, 4096), (4097, 2), (5000, 3192)] {
            let worst = pages(page - 1, first) + pages(page - 1, second);
            assert!(most_slot_bytes(first + second, 2) >= worst, "{first} {second}");
        }
    }

    #[test]
    fn the_reserve_is_left_of_the_available_memory() {
        for budget in [0, 1, 1 << 30, 20 << 30, 112 << 30, 1 << 40] {
            let available = available_for_budget(budget);
            let left = |available: u64| available.saturating_sub(RESERVE_BYTES.max(available / RESERVE_SHARE));
            assert!(left(available) >= budget, "{budget}");
            assert!(left(available - 2) <= budget, "{budget}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(default_budget() > 0);
        assert!(peak_bytes().is_none_or(|b| b > 1 << 20));
    }
}
