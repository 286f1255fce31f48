//! The command line of the kernel that is started: the entry's, and what the machine needs.

use thiserror::Error;

/// A command line that the kernel does not take.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "the command line has {bytes} bytes with what the machine needs, {max} are the most: shorten that of the entry {title:?}"
)]
pub struct CmdlineTooLong {
    /// The entry.
    pub title: String,
    /// Its bytes.
    pub bytes: usize,
    /// What the kernel takes.
    pub max: usize,
}

/// Parameters of the loader's own command line that describe the machine, and so hold for the next
/// kernel as well.
const OF_THE_MACHINE: &[&str] = &[
    "pci=conf1",
    "virtio_mmio.device=",
    "memhp_default_state=",
    "maxcpus=",
];

/// Splits a command line into its parameters, which are apart by white space outside of `"`.
pub fn parameters(line: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    line.split(move |letter: char| {
        if letter == '"' {
            is_quoted = !is_quoted;
        }
        !is_quoted && letter.is_whitespace()
    })
    .filter(|parameter| !parameter.is_empty())
}

/// Returns the parameters of the loader's own command line that the next kernel needs: those that
/// stand for the machine before the ` -- `.
#[must_use]
pub fn of_the_machine(own: &str) -> Vec<String> {
    parameters(own)
        .take_while(|parameter| *parameter != "--")
        .filter(|parameter| {
            OF_THE_MACHINE
                .iter()
                .any(|known| parameter.starts_with(known))
        })
        .map(str::to_owned)
        .collect()
}

/// Keeps Linux from testing its own cryptography at each boot, which is close to half of a boot's
/// work. Its default is not to; distributions turn it on.
const NO_SELF_TESTS: &str = "cryptomgr.notests";

/// Returns the parameter that turns the kernel's self-tests off, unless the entry wants them: it is
/// for a machine that follows FIPS 140, or says itself whether they are run.
#[must_use]
pub fn without_self_tests(entry: &str) -> Option<String> {
    let is_own = |parameter: &str| {
        let name = parameter.split('=').next().unwrap_or_default();
        name == "fips" || name == NO_SELF_TESTS
    };
    (!parameters(entry).any(is_own)).then(|| NO_SELF_TESTS.to_owned())
}

/// Returns an entry's command line with what the machine needs.
///
/// `needed` is put after the entry's own parameters, so that it decides where a later one wins. The
/// serial console comes last unless the entry names it, and so becomes `/dev/console`. What is
/// after a ` -- ` belongs to the entry's init and stays at the end.
#[must_use]
pub fn complete(entry: &str, needed: &[String]) -> String {
    let all: Vec<&str> = parameters(entry).collect();
    let end = all.iter().position(|parameter| *parameter == "--");
    let (kernel, init) = all.split_at(end.unwrap_or(all.len()));
    let mut line: Vec<&str> = kernel.to_vec();
    for parameter in needed {
        if !line.contains(&parameter.as_str()) {
            line.push(parameter);
        }
    }
    let is_serial = |parameter: &&str| {
        parameter
            .strip_prefix("console=")
            .is_some_and(|console| console == "ttyS0" || console.starts_with("ttyS0,"))
    };
    if !line.iter().any(is_serial) {
        line.push("console=ttyS0");
    }
    line.extend(init);
    line.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn needed(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn the_console_is_added_unless_it_is_named() {
        let with = |entry| complete(entry, &[]);
        assert_eq!(with("root=/dev/vda1 ro"), "root=/dev/vda1 ro console=ttyS0");
        assert_eq!(with("console=tty0"), "console=tty0 console=ttyS0");
        assert_eq!(
            with("console=ttyS0,115200n8 quiet"),
            "console=ttyS0,115200n8 quiet"
        );
        assert_eq!(
            with("console=ttyS0 console=tty1"),
            "console=ttyS0 console=tty1"
        );
        assert_eq!(with("console=ttyS01"), "console=ttyS01 console=ttyS0");
        assert_eq!(with(""), "console=ttyS0");
    }

    #[test]
    fn what_the_machine_needs_stands_before_inits_arguments() {
        let line = complete("ro quiet -- single", &needed(&["pci=conf1", "quiet"]));
        assert_eq!(line, "ro quiet pci=conf1 console=ttyS0 -- single");
    }

    #[test]
    fn the_loaders_own_line_tells_what_the_machine_needs() {
        let own = "console=ttyS0 quiet panic=-1 pci=conf1 maxcpus=2 virtio_mmio.device=4K@0xc0000000:5 -- --append pci=off";
        assert_eq!(
            of_the_machine(own),
            [
                "pci=conf1",
                "maxcpus=2",
                "virtio_mmio.device=4K@0xc0000000:5"
            ]
        );
    }

    #[test]
    fn self_tests_are_left_to_an_entry_that_wants_them() {
        let off = Some("cryptomgr.notests".to_owned());
        assert_eq!(without_self_tests("root=/dev/vda1 ro"), off);
        assert_eq!(without_self_tests("fips=1 ro"), None);
        assert_eq!(without_self_tests("cryptomgr.notests=0"), None);
    }

    #[test]
    fn quotes_keep_white_space() {
        let all: Vec<_> = parameters("a  \"b c\" dyndbg=\"x y\"\td").collect();
        assert_eq!(all, ["a", "\"b c\"", "dyndbg=\"x y\"", "d"]);
    }

    proptest! {
        #[test]
        fn all_of_the_entry_stays_in_its_order(words in proptest::collection::vec("[a-z.=0-9]{1,6}", 0..8)) {
            let line = complete(&words.join(" "), &needed(&["pci=conf1"]));
            let mut rest = parameters(&line);
            for word in &words {
                prop_assert!(rest.any(|have| have == word), "{} in {}", word, line);
            }
        }
    }
}
