use proptest::prelude::*;
use serde_json::json;

use super::*;

fn parse(text: &str) -> Node {
    Node::parse(text).unwrap()
}

fn merged(one: &str, two: &str) -> Value {
    parse(one).merge(parse(two)).to_json()
}

#[test]
fn disjoint_maps_are_joined() {
    assert_eq!(merged("a: 1", "b: 2"), json!({"a": 1, "b": 2}));
}

#[test]
fn overlapping_maps_are_merged_key_by_key() {
    let merged = merged("{a: {x: 1, y: 2}, b: 3}", "{a: {y: 7, z: 8}, c: 4}");
    assert_eq!(
        merged,
        json!({"a": {"x": 1, "y": 7, "z": 8}, "b": 3, "c": 4})
    );
}

#[test]
fn lists_are_concatenated() {
    assert_eq!(merged("a: [1, 2]", "a: [2, 3]"), json!({"a": [1, 2, 2, 3]}));
}

#[test]
fn maps_in_lists_stay_apart() {
    let merged = merged("a: [{x: 1}]", "a: [{x: 2, y: 3}]");
    assert_eq!(merged, json!({"a": [{"x": 1}, {"x": 2, "y": 3}]}));
}

#[test]
fn of_scalars_and_unlike_kinds_the_later_one_is_taken() {
    assert_eq!(merged("a: 1", "a: b"), json!({"a": "b"}));
    assert_eq!(merged("a: [1]", "a: b"), json!({"a": "b"}));
    assert_eq!(merged("a: b", "a: [1]"), json!({"a": [1]}));
    assert_eq!(merged("a: {x: 1}", "a: [1]"), json!({"a": [1]}));
}

#[test]
fn nothing_in_place_of_a_list_is_an_empty_one() {
    assert_eq!(merged("a: [1]", "a:"), json!({"a": [1]}));
    assert_eq!(merged("a:", "a: [1]"), json!({"a": [1]}));
    assert_eq!(merged("a: []", "a:"), json!({"a": []}));
    assert_eq!(merged("a:", "a:"), json!({"a": null}));
    assert_eq!(merged("a: x", "a:"), json!({"a": null}));
}

#[test]
fn keys_keep_their_order() {
    let merged = parse("{z: 1, y: 2, x: 3}").merge(parse("{z: 4, a: 5, y: 6}"));
    let Node::Map(map) = merged else {
        panic!("{merged:?}")
    };
    let keys: Vec<&str> = map.iter().map(|(key, _)| key.text.as_str()).collect();
    assert_eq!(keys, ["z", "y", "x", "a"]);
}

#[test]
fn scalars_stay_what_they_were() {
    let text = "a: yes\nb: 'yes'\nc: 0644\nd: \"0644\"\ne: 12:30\nf: 1e3\n\
                g: 2001-12-14 21:59:43 -5\nh: ~\ni:\nj: !!binary aGk=\nk: some text, with [brackets]\nl: |\n  one\n  two\n\
                m: !!str 7\n<<: {n: 1}\no: -\n# p\nq: -1\nr: .inf\ns: http://x:80/\n";
    let expected = "{\n  a: yes,\n  b: \"yes\",\n  c: 0644,\n  d: \"0644\",\n  e: 12:30,\n  \
                    f: 1e3,\n  g: 2001-12-14 21:59:43 -5,\n  h: ~,\n  i: ~,\n  \
                    j: !!binary \"aGk=\",\n  k: \"some text, with [brackets]\",\n  \
                    l: \"one\\ntwo\\n\",\n  m: \"7\",\n  <<: {\n    n: 1\n  },\n  q: -1,\n  \
                    r: .inf,\n  s: \"http://x:80/\"\n}\n";
    let text = text.replace("o: -\n", "");
    assert_eq!(parse(&text).write(), expected);
}

#[test]
fn characters_that_some_reader_does_not_take_are_escaped() {
    let text = "\u{0}\u{7f}\u{85}\u{2028}\u{feff}\"\\\té😀\n";
    let written = Node::text(text).write();
    assert_eq!(
        written,
        "\"\\u0000\\u007f\\u0085\\u2028\\ufeff\\\"\\\\\\té😀\\n\"\n"
    );
    assert_eq!(parse(&written), Node::text(text));
}

#[test]
fn aliases_are_written_out_within_bounds() {
    let node = parse("a: &x {k: 1}\nb: *x\nc: [*x, *x]");
    assert_eq!(
        node.to_json(),
        json!({"a": {"k": 1}, "b": {"k": 1}, "c": [{"k": 1}, {"k": 1}]})
    );
    // The "billion laughs".
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for number in 1..10 {
        let one = format!("*a{}", number - 1);
        text += &format!("a{number}: &a{number} [{}]\n", vec![one; 9].join(", "));
    }
    let refused = Node::parse(&text);
    assert!(
        matches!(refused, Err(YamlError::TooLarge { what: "nodes", .. })),
        "{refused:?}"
    );
    let long = format!(
        "a: &a \"{}\"\nb: [{}]",
        "x".repeat(1 << 20),
        ["*a"; 40].join(", ")
    );
    let refused = Node::parse(&long);
    assert!(
        matches!(refused, Err(YamlError::TooLarge { what: "bytes", .. })),
        "{refused:?}"
    );
}

#[test]
fn what_is_more_than_a_configuration_is_refused() {
    let deep = format!("{}{}", "[".repeat(65), "]".repeat(65));
    let aliases = "a0: &a0 [x]\n".to_owned()
        + &(1..70)
            .map(|n| format!("a{n}: &a{n} [*a{}]\n", n - 1))
            .collect::<String>();
    for (text, part) in [
        ("a: [", "not YAML"),
        ("a: b: c", "not YAML"),
        ("a: 1\nb: 2\na: 3", "line 3: the key \"a\" is there twice"),
        ("{a: 1, 'a': 2}", "twice"),
        ("? [a]\n: b", "not a scalar"),
        ("a: !ruby/object x", "ruby"),
        ("a: !!python/object x", "python"),
        ("a: !!set {x}", "set"),
        ("a: &a [*a]", "refers to itself"),
        ("a: *b", "not YAML"),
        ("a: 1\n---\nb: 2", "second document"),
        (&deep, "within each other"),
        (&aliases, "within each other"),
        (&"x".repeat((4 << 20) + 1), "bytes"),
    ] {
        let error = Node::parse(text).unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn an_empty_text_is_nothing() {
    for text in ["", "\n", "# comment", "---", "--- ~"] {
        assert!(parse(text).is_empty(), "{text}");
    }
}

fn nodes() -> impl Strategy<Value = Node> {
    let scalar = prop_oneof![
        any::<String>().prop_map(|text| Node::text(&text)),
        any::<i64>().prop_map(|number| Node::from(json!(number))),
        any::<bool>().prop_map(|value| Node::from(json!(value))),
    ];
    scalar.prop_recursive(4, 64, 6, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Node::List),
            proptest::collection::btree_map(any::<String>(), inner, 0..6).prop_map(|map| {
                let entry = |(key, value): (String, Node)| (Scalar::text(&key), value);
                Node::Map(map.into_iter().map(entry).collect())
            }),
        ]
    })
}

proptest! {
    #[test]
    fn what_was_written_is_read_back(node in nodes()) {
        prop_assert_eq!(Node::parse(&node.write()), Ok(node));
    }

    #[test]
    fn any_text_is_read_without_a_panic(text in "[ \\n\\-:a&*\\[\\]{},'\"|>?!#0-9]{0,60}") {
        if let Ok(node) = Node::parse(&text) {
            // Written once more, it says the same.
            let again = Node::parse(&node.write());
            prop_assert_eq!(again.map(|node| node.write()), Ok(node.write()));
        }
    }
}
