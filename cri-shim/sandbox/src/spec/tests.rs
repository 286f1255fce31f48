//! Tests of `spec`: docker's rules for entrypoint, command, environment and user.

use oci_spec::image::ConfigBuilder;
use oci_spec::runtime::Capability;

use super::*;

fn image() -> image::Config {
    ConfigBuilder::default()
        .entrypoint(vec!["/entry".to_owned()])
        .cmd(vec!["default".to_owned()])
        .env(vec!["PATH=/bin".to_owned(), "LANG=C".to_owned()])
        .working_dir("/srv")
        .user("app:staff")
        .build()
        .unwrap()
}

fn build(options: &ContainerOptions) -> ContainerSpec {
    container_spec("c1", "guest", Some(&image()), options).unwrap()
}

fn args(options: &ContainerOptions) -> Vec<String> {
    let container = build(options);
    let process = container.spec.process().clone().unwrap();
    process.args().clone().unwrap()
}

fn env(options: &ContainerOptions) -> Vec<String> {
    let container = build(options);
    let process = container.spec.process().clone().unwrap();
    process.env().clone().unwrap()
}

fn strings(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| (*s).to_owned()).collect()
}

#[test]
fn the_image_alone_says_what_runs() {
    let options = ContainerOptions::default();
    assert_eq!(args(&options), ["/entry", "default"]);
    let container = build(&options);
    assert_eq!(container.user, "app:staff");
    let process = container.spec.process().as_ref().unwrap();
    assert_eq!(process.cwd(), &PathBuf::from("/srv"));
    assert_eq!(process.terminal(), Some(false));
}

#[test]
fn what_an_image_leaves_empty_is_none_of_its_settings() {
    let image = ConfigBuilder::default()
        .entrypoint(strings(&[""]))
        .cmd(strings(&["/bin/sh", ""]))
        .env(strings(&["", "=x", "A="]))
        .working_dir("")
        .user("")
        .build()
        .unwrap();
    let built = |command: &[&str]| {
        let options = ContainerOptions {
            command: strings(command),
            ..Default::default()
        };
        container_spec("c1", "guest", Some(&image), &options).unwrap()
    };
    let container = built(&[]);
    assert_eq!(container.user, "");
    let process = container.spec.process().clone().unwrap();
    assert_eq!(process.args().clone().unwrap(), ["/bin/sh", ""]);
    assert_eq!(process.cwd(), &PathBuf::from("/"));
    let env = process.env().clone().unwrap();
    assert_eq!(env.last().unwrap(), "A=");
    assert!(env.iter().all(|entry| !entry.is_empty() && entry != "=x"));
    let process = built(&["ls", "/"]).spec.process().clone().unwrap();
    assert_eq!(process.args().clone().unwrap(), ["ls", "/"]);
}

#[test]
fn a_command_replaces_the_images_command_and_keeps_its_entrypoint() {
    let options = ContainerOptions {
        command: strings(&["a", "b"]),
        ..Default::default()
    };
    assert_eq!(args(&options), ["/entry", "a", "b"]);
}

#[test]
fn an_entrypoint_drops_the_images_command() {
    let mut options = ContainerOptions {
        entrypoint: Some("/bin/sh".to_owned()),
        ..Default::default()
    };
    assert_eq!(args(&options), ["/bin/sh"]);
    options.command = strings(&["-c", "true"]);
    assert_eq!(args(&options), ["/bin/sh", "-c", "true"]);
}

#[test]
fn an_empty_entrypoint_leaves_the_command_alone() {
    let mut options = ContainerOptions {
        entrypoint: Some(String::new()),
        command: strings(&["ls"]),
        ..Default::default()
    };
    assert_eq!(args(&options), ["ls"]);
    options.command.clear();
    let refused = container_spec("c1", "guest", Some(&image()), &options);
    assert!(matches!(refused, Err(SpecError::NoCommand)));
}

#[test]
fn an_image_without_a_command_needs_one() {
    let refused = container_spec("c1", "guest", None, &ContainerOptions::default());
    assert!(matches!(refused, Err(SpecError::NoCommand)));
    let options = ContainerOptions {
        command: strings(&["sh"]),
        ..Default::default()
    };
    assert!(container_spec("c1", "guest", None, &options).is_ok());
}

#[test]
fn variables_replace_those_of_the_image_in_their_place() {
    let options = ContainerOptions {
        env: strings(&["LANG=de_DE.UTF-8", "EMPTY=", "EQ=a=b", "HOSTNAME"]),
        ..Default::default()
    };
    assert_eq!(
        env(&options),
        ["PATH=/bin", "LANG=de_DE.UTF-8", "EMPTY=", "EQ=a=b"]
    );
}

#[test]
fn a_terminal_brings_term_unless_the_image_sets_it() {
    let size = TerminalSize {
        rows: 30,
        columns: 100,
    };
    let options = ContainerOptions {
        terminal: Some(size),
        ..Default::default()
    };
    assert!(env(&options).contains(&"TERM=xterm".to_owned()));
    let process = build(&options).spec.process().clone().unwrap();
    assert_eq!(process.terminal(), Some(true));
    let console = process.console_size().unwrap();
    assert_eq!((console.height(), console.width()), (30, 100));
}

#[test]
fn a_variable_without_a_name_is_refused() {
    for bad in ["", "=x"] {
        let options = ContainerOptions {
            env: strings(&[bad]),
            ..Default::default()
        };
        let refused = container_spec("c1", "guest", Some(&image()), &options);
        assert!(matches!(refused, Err(SpecError::NamelessVariable(_))));
    }
}

#[test]
fn a_relative_working_directory_is_refused_from_the_user_and_rooted_from_an_image() {
    let options = ContainerOptions {
        workdir: Some("srv".to_owned()),
        ..Default::default()
    };
    let refused = container_spec("c1", "guest", Some(&image()), &options);
    assert!(matches!(refused, Err(SpecError::RelativeWorkdir(_))));

    let mut config = image();
    config.set_working_dir(Some("app".to_owned()));
    let container = container_spec("c1", "guest", Some(&config), &ContainerOptions::default());
    let process = container.unwrap().spec.process().clone().unwrap();
    assert_eq!(process.cwd(), &PathBuf::from("/app"));
}

#[test]
fn nul_bytes_are_refused() {
    let options = ContainerOptions {
        command: strings(&["a\0b"]),
        ..Default::default()
    };
    let refused = container_spec("c1", "guest", Some(&image()), &options);
    assert!(matches!(refused, Err(SpecError::Nul { .. })));
}

#[test]
fn the_user_of_the_flag_wins() {
    let options = ContainerOptions {
        user: Some("1000:1000".to_owned()),
        ..Default::default()
    };
    assert_eq!(build(&options).user, "1000:1000");
}

#[test]
fn a_read_only_root_is_said_in_the_specification() {
    let options = ContainerOptions {
        root: RootAccess::ReadOnly,
        ..Default::default()
    };
    let spec = build(&options).spec;
    assert_eq!(spec.root().as_ref().unwrap().readonly(), Some(true));
    let spec = build(&ContainerOptions::default()).spec;
    assert_eq!(spec.root().as_ref().unwrap().readonly(), Some(false));
}

#[test]
fn a_container_gets_neither_more_namespaces_nor_more_capabilities_than_a_pods() {
    let spec = build(&ContainerOptions::default()).spec;
    assert_eq!((spec.hostname(), spec.domainname()), (&None, &None));
    let linux = spec.linux().as_ref().unwrap();
    let kinds: Vec<_> = linux
        .namespaces()
        .iter()
        .flatten()
        .map(|n| n.typ())
        .collect();
    assert_eq!(
        kinds,
        [
            LinuxNamespaceType::Pid,
            LinuxNamespaceType::Mount,
            LinuxNamespaceType::Cgroup
        ]
    );
    assert_eq!(linux.cgroups_path(), &Some(PathBuf::from("/podvisor/c1")));
    let process = spec.process().as_ref().unwrap();
    let capabilities = process.capabilities().as_ref().unwrap();
    assert!(
        !capabilities
            .bounding()
            .as_ref()
            .unwrap()
            .contains(&Capability::SysAdmin)
    );
    assert!(capabilities.ambient().as_ref().unwrap().is_empty());
}

#[test]
fn the_specification_survives_json_and_is_small() {
    let spec = build(&ContainerOptions::default()).spec;
    let json = serde_json::to_vec(&spec).unwrap();
    assert!(json.len() < 32 * 1024, "{} bytes", json.len());
    assert_eq!(serde_json::from_slice::<Spec>(&json).unwrap(), spec);
}
