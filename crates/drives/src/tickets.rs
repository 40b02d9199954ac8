//! Reads in flight, by ticket.

use crate::backend::Ticket;

/// A table whose places are reused under a new generation, so that a late answer never meets a later read.
#[derive(Debug)]
pub(crate) struct Tickets<T> {
    places: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Tickets<T> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Tickets<T> {
    /// Gives out a ticket for a value.
    pub(crate) fn issue(&mut self, value: T) -> Ticket {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            (self.places.len() - 1) as u32
        });
        let (generation, place) = &mut self.places[index as usize];
        *place = Some(value);
        Ticket {
            index,
            generation: *generation,
        }
    }

    /// Takes the value of a ticket back; `None` when the ticket was taken before.
    pub(crate) fn take(&mut self, ticket: Ticket) -> Option<T> {
        let (generation, place) = self.places.get_mut(ticket.index as usize)?;
        if *generation != ticket.generation {
            return None;
        }
        let value = place.take()?;
        *generation = generation.wrapping_add(1);
        self.free.push(ticket.index);
        Some(value)
    }

    /// The values whose tickets are out.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.places.iter().filter_map(|(_, place)| place.as_ref())
    }

    /// The same, to change.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.places.iter_mut().filter_map(|(_, place)| place.as_mut())
    }

    /// Tickets that are out.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_answered_once() {
        let mut tickets = Tickets::default();
        let first = tickets.issue('a');
        assert_eq!(tickets.take(first), Some('a'));
        let second = tickets.issue('b');
        assert_eq!(second.index, first.index);
        assert_eq!(tickets.take(first), None);
        assert_eq!(tickets.len(), 1);
        assert_eq!(tickets.values().collect::<String>(), "b");
        assert_eq!(tickets.take(second), Some('b'));
        assert_eq!(tickets.take(second), None);
        assert_eq!(tickets.len(), 0);
    }
}
