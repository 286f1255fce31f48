//! Defaults of a container's process, whoever requests it: search path, environment, limits; and
//! additional processes in its place.

use oci_spec::OciSpecError;
use oci_spec::image;
use oci_spec::runtime::{PosixRlimit, PosixRlimitBuilder, PosixRlimitType, Process};

/// Search path of a program whose image sets none.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The default terminal type of programs with a terminal.
const TERMINAL_KIND: &str = "TERM=xterm";

/// A program's soft and hard limit of open files.
const OPEN_FILES: (u64, u64) = (1024, 524_288);

/// The default resource limits of a process.
pub fn default_rlimits() -> Result<Vec<PosixRlimit>, OciSpecError> {
    let open_files = PosixRlimitBuilder::default()
        .typ(PosixRlimitType::RlimitNofile)
        .soft(OPEN_FILES.0)
        .hard(OPEN_FILES.1);
    Ok(vec![open_files.build()?])
}

/// The variables of a process before its user's own: defaults, then the image's.
pub fn default_environment(
    hostname: &str,
    has_terminal: bool,
    image: Option<&image::Config>,
) -> Vec<String> {
    let mut env = vec![DEFAULT_PATH.to_owned(), format!("HOSTNAME={hostname}")];
    if has_terminal {
        env.push(TERMINAL_KIND.to_owned());
    }
    let of_image = image.and_then(|config| config.env().as_ref());
    for entry in of_image.into_iter().flatten() {
        // A malformed entry of an image is dropped: the image's user cannot repair it.
        if entry
            .split_once('=')
            .is_some_and(|(name, _)| !name.is_empty())
        {
            set_variable(&mut env, entry);
        }
    }
    env
}

/// Returns an image's entrypoint. Builders write `[""]` for `ENTRYPOINT [""]` and for a base image's
/// entrypoint that was reset; engines take it as none.
#[must_use]
pub fn image_entrypoint(image: &image::Config) -> &[String] {
    match image.entrypoint().as_deref().unwrap_or_default() {
        [only] if only.is_empty() => &[],
        entrypoint => entrypoint,
    }
}

/// `NAME=VALUE` replaces the variable's value in place, or is appended; `NAME` removes it.
pub fn set_variable(env: &mut Vec<String>, entry: &str) {
    let Some((name, _)) = entry.split_once('=') else {
        env.retain(|old| variable_name(old) != entry);
        return;
    };
    match env.iter_mut().find(|old| variable_name(old) == name) {
        Some(old) => entry.clone_into(old),
        None => env.push(entry.to_owned()),
    }
}

fn variable_name(entry: &str) -> &str {
    entry.split_once('=').map_or(entry, |(name, _)| name)
}

/// Makes a directory absolute: a relative one is relative to the root, as in Dockerfiles.
pub fn from_root(dir: &str) -> String {
    format!("/{}", dir.trim_start_matches('/'))
}

/// Makes an additional process in a container: as the container's own, except for its command.
pub fn further_process(own: &Process, command: Vec<String>, has_terminal: bool) -> Process {
    let mut process = own.clone();
    process.set_args(Some(command));
    process.set_terminal(Some(has_terminal));
    process.set_console_size(None);
    let mut env = process.env().clone().unwrap_or_default();
    if has_terminal && !env.iter().any(|entry| variable_name(entry) == "TERM") {
        env.push(TERMINAL_KIND.to_owned());
        process.set_env(Some(env));
    }
    process
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_images_malformed_variables_are_left_out() {
        let entries = ["A=1", "=2", "", "HOSTNAME", "PATH=/bin"];
        let image = image::ConfigBuilder::default()
            .env(entries.map(str::to_owned).to_vec())
            .build()
            .unwrap();
        let env = default_environment("h", true, Some(&image));
        assert_eq!(env, ["PATH=/bin", "HOSTNAME=h", TERMINAL_KIND, "A=1"]);
    }

    #[test]
    fn a_variable_keeps_its_place_and_goes_by_its_name_alone() {
        let mut env = vec!["A=1".to_owned(), "B=2".to_owned()];
        for entry in ["A=x=y", "C=", "B"] {
            set_variable(&mut env, entry);
        }
        assert_eq!(env, ["A=x=y", "C="]);
    }

    #[test]
    fn a_further_process_with_a_terminal_is_told_of_which_kind() {
        let mut own = Process::default();
        let terms = |own: &Process, has_terminal| -> Vec<String> {
            let process = further_process(own, vec!["sh".to_owned()], has_terminal);
            let env = process.env().clone().unwrap_or_default();
            env.into_iter().filter(|e| e.starts_with("TERM=")).collect()
        };
        own.set_env(Some(vec!["PATH=/bin".to_owned()]));
        assert_eq!(terms(&own, true), [TERMINAL_KIND]);
        assert!(terms(&own, false).is_empty());
        own.set_env(Some(vec!["TERM=linux".to_owned()]));
        assert_eq!(terms(&own, true), ["TERM=linux"]);
    }
}
