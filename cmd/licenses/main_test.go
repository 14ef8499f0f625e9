package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const isc = `Copyright 2020 Somebody

Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby granted, provided that the
above copyright notice and this permission notice appear in all copies.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING ALL IMPLIED WARRANTIES OF
MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL, DIRECT, INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY
DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR PROFITS, WHETHER IN AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION,
ARISING OUT OF OR IN CONNECTION WITH THE USE OR PERFORMANCE OF THIS SOFTWARE.
`

func TestModulesNeedAKnownLicense(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		files map[string]string
		want  string // in the error; "" for none
	}{
		"known":            {map[string]string{"LICENSE": isc, "NOTICE.txt": "made by Somebody"}, ""},
		"none":             {map[string]string{"README.md": isc}, "it has no license"},
		"unknown text":     {map[string]string{"LICENSE": "All rights reserved."}, "known license"},
		"mostly something": {map[string]string{"LICENSE": isc + strings.Repeat("You must pay for each use of it. ", 200)}, "known license"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for file, text := range tt.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			l, err := read(module{Path: "example.com/m", Dir: dir})
			switch {
			case tt.want == "" && err != nil:
				t.Fatal(err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("got %v, want %q", err, tt.want)
			case tt.want == "" && (len(l.ids) != 1 || l.ids[0] != "ISC" || len(l.texts) != 2):
				t.Errorf("got %q and %d texts", l.ids, len(l.texts))
			}
		})
	}
}

func TestTextsOfContainedModulesArePassedOn(t *testing.T) {
	t.Parallel()
	contained := []license{{module: module{Path: "example.com/a", Version: "v1.0.0"}, ids: []string{"ISC"}, texts: []string{"text of a\n"}}}
	development := []license{{module: module{Path: "example.com/b", Version: "v2.0.0"}, ids: []string{"MIT", "Zlib"}, texts: []string{"text of b\n"}}}
	var out bytes.Buffer
	if err := write(&out, contained, development); err != nil {
		t.Fatal(err)
	}
	first, second, _ := strings.Cut(out.String(), "It does not contain")
	if !strings.Contains(first, "\nexample.com/a v1.0.0 (ISC)\n") || !strings.Contains(second, "\nexample.com/b v2.0.0 (MIT, Zlib)\n") {
		t.Errorf("the modules are not listed:\n%s", out.String())
	}
	if !strings.Contains(second, "text of a") || strings.Contains(second, "text of b") {
		t.Errorf("want only the text of a:\n%s", out.String())
	}
}
