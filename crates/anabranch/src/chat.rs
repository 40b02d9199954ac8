//! A conversation, line by line.

use std::io::BufRead;

use checkpoint::chat::{Effort, Message, Role, render};
use engine::{Finish, Request, Sequence, Transcript};

use crate::answer::{Answer, Answerer};
use crate::error::Error;
use crate::model;
use crate::output::Screen;
use crate::run::{Room, utf8};
use crate::session::SessionFile;
use crate::settings::Generation;
use crate::signals::Interrupt;

const WELCOME: &str = "A line is a message. Ctrl-C stops an answer; /new begins anew; /quit or Ctrl-D ends the chat.\n";
const READY: &str = "> ";
const QUIT: &str = "/quit";
const NEW: &str = "/new";

/// A conversation and the sequence that has seen most of it.
pub struct Chat<'a> {
    pub answerer: Answerer<'a>,
    pub generation: &'a Generation,
    pub effort: Effort,
    pub messages: Vec<Message>,
    pub sequence: Option<Sequence>,
    /// Whether that sequence came from the session file.
    pub from_session: bool,
    /// The file to save to after each answer.
    pub session: Option<SessionFile>,
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
        let prompt = render(self.answerer.tokenizer, &self.messages, self.effort);
        let made = self.answer(&prompt, screen, interrupt)?;
        model::pass_notices_on(self.answerer.engine);
        if self.stats {
            screen.aside(&made.table());
        }
        if made.finish_reason == Finish::Cancelled {
            screen.aside("(stopped)\n");
        }
        if made.ids.is_empty() {
            self.messages.pop();
            return Ok(());
        }
        self.messages.push(made.message(self.effort));
        if let (Some(session), Some(sequence)) = (&self.session, &self.sequence) {
            let saved = session.save(self.answerer.engine, sequence, &prompt, &made, Some(&self.messages));
            // The conversation goes on; the next answer is saved with this one.
            if let Err(problem) = saved {
                screen.aside(&format!("note: the session was not saved: {problem}\n"));
            }
        }
        drop(working);
        Ok(())
    }

    fn answer(&mut self, prompt: &[u32], screen: &mut Screen<'_>, interrupt: &Interrupt) -> Result<Answer, Error> {
        let engine = &self.answerer.engine;
        let positions = engine.plan().positions;
        let room = Room::new(prompt.len(), self.generation.max_tokens, Some(positions), positions)?;
        let stop_ids = engine.checkpoint().stop_ids().to_vec();
        let mut begun = self.answerer.begin(self.sequence.take(), prompt);
        let seen = begun.sequence.ids().len();
        if self.session.is_some() {
            begun.sequence.decode_in_whole_passes();
        }
        let request = Request {
            prompt: prompt[seen..].to_vec(),
            max_tokens: room.max_tokens,
            stop_ids,
            sampling: self.generation.sampling,
        };
        let transcript = Transcript::chat(self.effort, self.generation.stops.clone());
        let made = self
            .answerer
            .answer(&mut begun, request, transcript, screen, interrupt.cancel());
        let from_session = std::mem::take(&mut self.from_session);
        let made = made.map(|mut made| {
            if from_session {
                made.stats.session_tokens_restored = seen - begun.from_store;
            }
            made
        });
        self.sequence = Some(begun.sequence);
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::Checkpoint;
    use checkpoint::tokenizer::Tokenizer;
    use engine::{Engine, Options, Sampling};
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
        let engine = Engine::open(checkpoint, &options, &mut |_| ()).unwrap();
        (engine, Tokenizer::load(&golden()).unwrap())
    }

    fn answerer<'a>(engine: &'a mut Engine, tokenizer: &'a Tokenizer) -> Answerer<'a> {
        Answerer {
            engine,
            tokenizer,
            store: None,
        }
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
        talk_in(lines, None)
    }

    /// The same, as the continuation of a session.
    fn talk_in(lines: &[u8], path: Option<&Path>) -> (String, String, Vec<Message>) {
        let ((mut engine, tokenizer), generation) = (open(), generation());
        let mut session = path.map(|path| SessionFile::open(path, true).unwrap());
        let sequence = session.as_mut().and_then(|session| session.restore(&engine).unwrap());
        let mut chat = Chat {
            answerer: answerer(&mut engine, &tokenizer),
            generation: &generation,
            effort: Effort::Off,
            messages: session.iter().flat_map(|s| s.messages.clone()).flatten().collect(),
            from_session: sequence.is_some(),
            sequence,
            session,
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
            let mut answerer = answerer(&mut engine, &tokenizer);
            let mut begun = answerer.begin(None, &request.prompt);
            let (mut no_text, mut no_side) = (std::io::sink(), std::io::sink());
            let fresh = answerer.answer(
                &mut begun,
                request,
                Transcript::chat(Effort::Off, vec![]),
                &mut Screen::new(&mut no_text, &mut no_side, false),
                Interrupt::default().cancel(),
            );
            assert_eq!(fresh.unwrap().text, messages[answered].content);
        }
    }

    /// In one run, or with the program ended between any two questions.
    #[test]
    fn a_session_goes_on_as_if_nothing_had_been() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        let (_, _, want) = talk(b"hello\nwhy?\nand then?\n");
        assert_eq!(want.len(), 6);
        for (n, line) in [&b"hello\n"[..], b"why?\n", b"and then?\n"].into_iter().enumerate() {
            let (_, side, messages) = talk_in(line, Some(&path));
            assert!(!side.contains("not saved"), "{side}");
            assert_eq!(messages, want[..2 * n + 2]);
        }
        // /new leaves the messages before; the next answer begins the file anew.
        let (_, _, messages) = talk_in(b"/new\nhello\n", Some(&path));
        assert_eq!(messages, want[..2]);
        assert_eq!(SessionFile::open(&path, true).unwrap().messages.unwrap(), want[..2]);
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
        let (mut engine, tokenizer) = open();
        let prompt = [5, 6, 7, 8];
        let mut answerer = answerer(&mut engine, &tokenizer);
        assert!(answerer.begin(None, &prompt).sequence.ids().is_empty());
        for (seen, kept) in [(&[5, 6][..], 2), (&[5, 6, 7], 3), (&[5, 7], 0), (&[5, 6, 7, 8], 0)] {
            let mut sequence = answerer.engine.new_sequence();
            let no_progress = &mut |_| ();
            answerer
                .engine
                .prefill(&mut sequence, seen, Interrupt::default().cancel(), no_progress)
                .unwrap();
            let begun = answerer.begin(Some(sequence), &prompt);
            assert_eq!(begun.sequence.ids(), &prompt[..kept], "{seen:?}");
        }
    }
}
