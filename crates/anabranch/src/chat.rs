//! A conversation, line by line.

use std::io::BufRead;

use checkpoint::chat::{Effort, Message, Role, render};
use checkpoint::tokenizer::Tokenizer;
use engine::{Engine, Finish, Request, Sequence, Transcript};

use crate::answer::{Answer, answer};
use crate::error::Error;
use crate::model;
use crate::output::Screen;
use crate::run::{Room, utf8};
use crate::settings::Generation;
use crate::signals::Interrupt;

const WELCOME: &str = "A line is a message. Ctrl-C stops an answer; /new begins anew; /quit or Ctrl-D ends the chat.\n";
const READY: &str = "> ";
const QUIT: &str = "/quit";
const NEW: &str = "/new";

/// A conversation and the sequence that has seen most of it.
pub struct Chat<'a> {
    pub engine: &'a mut Engine,
    pub tokenizer: &'a Tokenizer,
    pub generation: &'a Generation,
    pub effort: Effort,
    pub messages: Vec<Message>,
    pub sequence: Option<Sequence>,
    /// Whether each answer is followed by its costs.
    pub stats: bool,
}

impl Chat<'_> {
    /// Answers lines until there are no more, or one says [`QUIT`].
    pub fn talk(
        &mut self,
        input: &mut dyn BufRead,
        screen: &mut Screen<'_>,
        interrupt: &Interrupt,
    ) -> Result<(), Error> {
        screen.aside(WELCOME);
        loop {
            screen.aside(READY);
            let mut line = vec![];
            if input.read_until(b'\n', &mut line).map_err(Error::Input)? == 0 {
                screen.aside("\n");
                return Ok(());
            }
            let line = match utf8(line.trim_ascii(), "the line") {
                Ok(line) => line,
                Err(problem) => {
                    screen.aside(&format!("note: {problem}\n"));
                    continue;
                }
            };
            match line.as_str() {
                "" => {}
                QUIT => return Ok(()),
                NEW => self.forget(),
                _ => match self.turn(line, screen, interrupt) {
                    Err(problem @ Error::TooLong { .. }) => {
                        // The conversation stays; only this question finds no room.
                        self.messages.pop();
                        screen.aside(&format!("note: {problem}; or say {NEW} to begin anew\n"));
                    }
                    done => done?,
                },
            }
        }
    }

    /// Leaves what the user gave as system message, and nothing else.
    fn forget(&mut self) {
        self.messages.retain(|message| message.role == Role::System);
        self.sequence = None;
    }

    /// One question and its answer. A question that was not answered at all is forgotten.
    fn turn(&mut self, question: String, screen: &mut Screen<'_>, interrupt: &Interrupt) -> Result<(), Error> {
        self.messages.push(Message::new(Role::User, question));
        let working = interrupt.working();
        let made = self.answer(screen, interrupt)?;
        drop(working);
        model::pass_notices_on(self.engine);
        if self.stats {
            screen.aside(&made.stats.table());
        }
        if made.finish_reason == Finish::Cancelled {
            screen.aside("(stopped)\n");
        }
        if made.ids.is_empty() {
            self.messages.pop();
            return Ok(());
        }
        let mut message = Message::new(Role::Assistant, made.text);
        message.reasoning = self.effort.thinks().then_some(made.reasoning);
        self.messages.push(message);
        Ok(())
    }

    fn answer(&mut self, screen: &mut Screen<'_>, interrupt: &Interrupt) -> Result<Answer, Error> {
        let prompt = render(self.tokenizer, &self.messages, self.effort);
        let positions = self.engine.plan().positions;
        let room = Room::new(prompt.len(), self.generation.max_tokens, Some(positions), positions)?;
        let (mut sequence, seen) = self.sequence_for(&prompt);
        let request = Request {
            prompt: prompt[seen..].to_vec(),
            max_tokens: room.max_tokens,
            stop_ids: self.engine.checkpoint().stop_ids().to_vec(),
            sampling: self.generation.sampling,
        };
        let transcript = Transcript::chat(self.effort, self.generation.stops.clone());
        let made = answer(
            self.engine,
            self.tokenizer,
            &mut sequence,
            request,
            transcript,
            screen,
            interrupt.cancel(),
        );
        self.sequence = Some(sequence);
        made
    }

    /// A sequence that has seen the beginning of `prompt`, and how much: the last one where its tokens are that beginning,
    /// else a new one.
    fn sequence_for(&mut self, prompt: &[u32]) -> (Sequence, usize) {
        // The old one is dropped before there is a new one: memory is set aside for one.
        let old = self.sequence.take().filter(|sequence| {
            let ids = sequence.ids();
            !sequence.is_spoilt() && ids.len() < prompt.len() && prompt.starts_with(ids)
        });
        match old {
            Some(sequence) => {
                let seen = sequence.ids().len();
                (sequence, seen)
            }
            None => (self.engine.new_sequence(), 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::Checkpoint;
    use engine::{Options, Sampling};
    use std::path::{Path, PathBuf};

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden/k3_a")
    }

    fn open() -> (Engine, Tokenizer) {
        let options = Options {
            memory: 1 << 30,
            positions: 1024,
            ..Options::default()
        };
        let checkpoint = Checkpoint::open(&golden()).unwrap();
        let engine = Engine::open(checkpoint, &options, &mut |_, _| ()).unwrap();
        (engine, Tokenizer::load(&golden()).unwrap())
    }

    fn generation() -> Generation {
        Generation {
            max_tokens: Some(12),
            sampling: Sampling::default(),
            stops: vec![],
        }
    }

    /// What a conversation over these lines shows, and its messages.
    fn talk(lines: &[u8]) -> (String, String, Vec<Message>) {
        let ((mut engine, tokenizer), generation) = (open(), generation());
        let mut chat = Chat {
            engine: &mut engine,
            tokenizer: &tokenizer,
            generation: &generation,
            effort: Effort::Off,
            messages: vec![],
            sequence: None,
            stats: false,
        };
        let (mut text, mut side) = (vec![], vec![]);
        let mut screen = Screen::new(&mut text, &mut side, false);
        chat.talk(&mut &*lines, &mut screen, &Interrupt::default()).unwrap();
        let messages = chat.messages;
        let string = |bytes| String::from_utf8(bytes).unwrap();
        (string(text), string(side), messages)
    }

    #[test]
    fn every_answer_is_the_one_to_the_whole_conversation() {
        let (text, side, messages) = talk(b"hello\n\n  why?  \n/quit\nnever read\n");
        assert_eq!(side, format!("{WELCOME}{}", READY.repeat(4)));
        let roles: Vec<Role> = messages.iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::User, Role::Assistant]);
        assert_eq!(messages[2].content, "why?");
        assert!(!text.trim().is_empty());
        for answered in [1, 3] {
            let (mut engine, tokenizer) = open();
            let request = Request {
                prompt: render(&tokenizer, &messages[..answered], Effort::Off),
                max_tokens: 12,
                stop_ids: engine.checkpoint().stop_ids().to_vec(),
                sampling: Sampling::default(),
            };
            let mut sequence = engine.new_sequence();
            let (mut no_text, mut no_side) = (std::io::sink(), std::io::sink());
            let fresh = answer(
                &mut engine,
                &tokenizer,
                &mut sequence,
                request,
                Transcript::chat(Effort::Off, vec![]),
                &mut Screen::new(&mut no_text, &mut no_side, false),
                Interrupt::default().cancel(),
            );
            assert_eq!(fresh.unwrap().text, messages[answered].content);
        }
    }

    #[test]
    fn a_line_that_is_no_text_is_passed_over() {
        let (text, side, messages) = talk(b"ab\xFF\n");
        assert_eq!((text.as_str(), messages.len()), ("", 0));
        assert!(side.contains("note: the line: found byte 0xff at offset 2"), "{side}");
        assert!(side.ends_with("> \n"), "{side}");
    }

    #[test]
    fn a_sequence_goes_on_where_the_prompt_does() {
        let ((mut engine, tokenizer), generation) = (open(), generation());
        let prompt = [5, 6, 7, 8];
        let mut chat = Chat {
            engine: &mut engine,
            tokenizer: &tokenizer,
            generation: &generation,
            effort: Effort::Off,
            messages: vec![],
            sequence: None,
            stats: false,
        };
        assert_eq!(chat.sequence_for(&prompt).1, 0);
        for (seen, kept) in [(&[5, 6][..], 2), (&[5, 6, 7], 3), (&[5, 7], 0), (&[5, 6, 7, 8], 0)] {
            let mut sequence = chat.engine.new_sequence();
            let no_progress = &mut |_| ();
            chat.engine
                .prefill(&mut sequence, seen, Interrupt::default().cancel(), no_progress)
                .unwrap();
            chat.sequence = Some(sequence);
            let (sequence, found) = chat.sequence_for(&prompt);
            assert_eq!((found, sequence.ids()), (kept, &prompt[..kept]), "{seen:?}");
        }
    }
}
