use std::process::Command;

use proptest::prelude::*;

use super::*;

fn volume(files: &[(&str, Vec<u8>)]) -> Volume {
    let mut volume = Volume::new("CIDATA").unwrap();
    for (path, content) in files {
        volume.add(path, content.clone()).unwrap();
    }
    volume
}

fn image(volume: &Volume) -> Vec<u8> {
    let mut image = Vec::new();
    let size = volume.write(&mut image).unwrap();
    assert_eq!(size, image.len() as u64);
    image
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|place| (place * 7 % 251) as u8).collect()
}

fn config_drive() -> Volume {
    volume(&[
        ("openstack/latest/meta_data.json", b"{}".to_vec()),
        ("openstack/latest/user_data", pattern(100_000)),
        ("openstack/latest/network_data.json", Vec::new()),
        ("a name with spaces and ümlauts.text", pattern(513)),
        ("user-data", pattern(511)),
        ("user-date", pattern(512)),
    ])
}

/// Volumes of each kind: FAT12, FAT16, FAT16 at its lower bound, FAT16 with larger clusters.
fn volumes() -> Vec<Volume> {
    let of = |length| volume(&[("content", pattern(length)), ("d/e/f", pattern(5))]);
    vec![
        volume(&[]),
        config_drive(),
        of(4060 * 512),
        of(4080 * 512),
        of(5 << 20),
        of(40 << 20),
    ]
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {text} {output:?}"
    );
    text
}

#[test]
fn what_was_written_is_read_back() {
    for volume in volumes() {
        let image = image(&volume);
        let (label, mut files) = read::read(&image).unwrap();
        files.sort();
        assert_eq!(label, "CIDATA");
        let expected: Vec<(String, Vec<u8>)> = volume
            .files()
            .map(|(path, content)| (path.to_owned(), content.to_vec()))
            .collect();
        assert_eq!(files, expected);
    }
}

#[test]
fn the_kernels_checker_finds_no_fault() {
    let dir = tempfile::tempdir().unwrap();
    for (number, volume) in volumes().iter().enumerate() {
        let path = dir.path().join(format!("{number}"));
        std::fs::write(&path, image(volume)).unwrap();
        run("fsck.vfat", &["-n", "-v", path.to_str().unwrap()]);
    }
}

#[test]
fn other_programs_read_the_files_and_the_label() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, image(&config_drive())).unwrap();
    let path = path.to_str().unwrap();
    let label = run("mlabel", &["-i", path, "-s", "::"]);
    assert!(label.contains("CIDATA"), "{label}");
    let user_data = dir.path().join("user_data");
    let to = user_data.to_str().unwrap();
    run("mcopy", &["-i", path, "::openstack/latest/user_data", to]);
    assert_eq!(std::fs::read(&user_data).unwrap(), pattern(100_000));
    let listed = run("mdir", &["-i", path, "-b", "-/", "::"]);
    assert!(listed.contains("network_data.json"), "{listed}");
    let found = run("blkid", &["-p", "-o", "export", path]);
    for expected in ["LABEL=CIDATA", "TYPE=vfat", "USAGE=filesystem"] {
        assert!(found.contains(expected), "{expected}: {found}");
    }
}

#[test]
fn there_are_no_partitions_on_the_disk() {
    for volume in volumes() {
        let image = image(&volume);
        assert!(image[446..510].iter().all(|byte| *byte == 0));
        assert_eq!(image[510..512], [0x55, 0xaa]);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, image(&config_drive())).unwrap();
    let output = Command::new("sfdisk")
        .arg("-d")
        .arg(&path)
        .output()
        .unwrap();
    let dump = String::from_utf8(output.stdout).unwrap();
    assert!(!dump.contains("start="), "{dump}");
}

#[test]
fn the_same_files_give_the_same_bytes() {
    assert_eq!(image(&config_drive()), image(&config_drive()));
    let other = volume(&[("user-data", b"other".to_vec())]);
    assert_ne!(image(&other)[39..43], image(&volume(&[]))[39..43]);
}

#[test]
fn volumes_are_as_small_as_their_files() {
    let small = image(&volume(&[
        ("meta-data", pattern(200)),
        ("user-data", pattern(3000)),
    ]));
    assert!(small.len() <= 6 << 10, "{}", small.len());
    let large = image(&volume(&[("content", pattern(40 << 20))]));
    assert!(large.len() <= 41 << 20, "{}", large.len());
}

#[test]
fn names_that_are_the_same_but_for_case_are_refused() {
    for (one, two) in [("a", "A"), ("a/b", "A/B"), ("a", "A/b"), ("ä", "Ä")] {
        let volume = volume(&[(one, Vec::new()), (two, Vec::new())]);
        let refused = volume.write(Vec::new());
        assert!(
            matches!(refused, Err(FatError::Twice(_))),
            "{one} {two}: {refused:?}"
        );
    }
    let mut volume = volume(&[("a", Vec::new())]);
    assert!(matches!(
        volume.add("a", Vec::new()),
        Err(FatError::Twice(_))
    ));
}

#[test]
fn what_is_no_volume_is_refused() {
    for label in ["", "twelve-chars", "a b", "a/b", "ä"] {
        assert!(
            matches!(Volume::new(label), Err(FatError::Label(_))),
            "{label}"
        );
    }
    let mut volume = volume(&[]);
    for path in ["", "/a", "a/", "a//b", "../a", "a/.", "a\nb"] {
        assert!(
            matches!(volume.add(path, Vec::new()), Err(FatError::Path(..))),
            "{path}"
        );
    }
    for number in 0..=MAX_FILES {
        volume.add(&format!("f{number}"), Vec::new()).unwrap();
    }
    let refused = volume.write(Vec::new());
    assert!(
        matches!(refused, Err(FatError::TooLarge { .. })),
        "{refused:?}"
    );
}

#[test]
fn a_full_disk_is_told() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let refused = config_drive().write(Full);
    assert!(matches!(refused, Err(FatError::Write(_))), "{refused:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_files_are_read_back(
        files in proptest::collection::btree_map(
            "[a-z]{1,3}(/[a-zA-Z0-9 _-]{1,30}[a-z]){0,3}",
            proptest::collection::vec(any::<u8>(), 0..3000),
            0..30,
        ),
    ) {
        let mut volume = Volume::new("x").unwrap();
        for (path, content) in &files {
            volume.add(path, content.clone()).unwrap();
        }
        let mut image = Vec::new();
        if volume.write(&mut image).is_ok() {
            let (_, mut found) = read::read(&image).unwrap();
            found.sort();
            let files: Vec<(String, Vec<u8>)> = files.into_iter().collect();
            prop_assert_eq!(found, files);
        }
    }
}
