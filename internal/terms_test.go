package internal_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// metaphors are words that no identifier may have. docs/glossary.md has the terms that are used instead.
var metaphors = []string{
	"asker", "belongings", "census", "circumstances", "claimant", "condemn", "departures", "doomed", "farewell", "fate", "feed", "footprint", "goodbye",
	"healer", "hindrance", "hopeless", "hush", "inbox", "incumbent", "insist", "motive", "outbox", "patience", "petition", "premises",
	"restless", "rival", "settlement", "shelf", "stow", "stranger", "strangers", "survey", "sweeper", "tally", "tenure", "vault", "verdict", "vigil",
	"whereabouts", "whoever",
}

// maxCommentColumns is the maximum width of a comment, with tabs counted as one column.
const maxCommentColumns = 120

// maxMarkdownColumns is the maximum width of a line in Markdown, except in tables, code blocks and headings.
const maxMarkdownColumns = 100

// TestMarkdownWidth checks the width of the documentation.
func TestMarkdownWidth(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../*.md")
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir("../docs", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") && !entry.IsDir() {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) < 20 {
		t.Fatalf("got %d files and error %v", len(files), err)
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		isCode, number := false, 0
		for line := range strings.Lines(string(text)) {
			line, number = strings.TrimRight(line, "\n"), number+1
			trimmed := strings.TrimSpace(line)
			if strings.HasPrefix(trimmed, "```") {
				isCode = !isCode
			}
			isWrapped := !isCode && !strings.HasPrefix(trimmed, "|") && !strings.HasPrefix(trimmed, "#") && strings.Contains(trimmed, " ")
			if width := utf8.RuneCountInString(line); isWrapped && width > maxMarkdownColumns {
				t.Errorf("%s:%d: the line has %d columns, at most %d are allowed", path, number, width, maxMarkdownColumns)
			}
		}
	}
}

// TestTerms checks the identifiers and the width of comments of all packages, tests included.
func TestTerms(t *testing.T) {
	t.Parallel()
	for _, root := range []string{"../api", "../cmd", "../internal", "../test"} {
		err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasPrefix(entry.Name(), "zz_generated") {
				return err
			}
			if entry.Name() == "terms_test.go" {
				return nil
			}
			files := token.NewFileSet()
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			checkIdentifiers(t, files, file)
			checkComments(t, path, string(text))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func checkIdentifiers(t *testing.T, files *token.FileSet, file *ast.File) {
	t.Helper()
	reported := map[string]bool{}
	ast.Inspect(file, func(node ast.Node) bool {
		ident, ok := node.(*ast.Ident)
		if !ok || reported[ident.Name] {
			return true
		}
		for _, word := range wordsOf(ident.Name) {
			if slices.Contains(metaphors, word) {
				reported[ident.Name] = true
				t.Errorf("%s: identifier %s has the word %q, see docs/glossary.md", files.Position(ident.Pos()), ident.Name, word)
			}
		}
		return true
	})
}

// wordsOf splits a Go identifier into its words, in lower case.
func wordsOf(identifier string) []string {
	words := regexp.MustCompile(`[A-Z]+(?:[a-z0-9]+|$)|[A-Z]?[a-z0-9]+|[A-Z]+`).FindAllString(identifier, -1)
	for i, word := range words {
		words[i] = strings.ToLower(word)
	}
	return words
}

// checkComments checks the width of comments in lines of their own.
func checkComments(t *testing.T, path string, text string) {
	t.Helper()
	number := 0
	for line := range strings.Lines(text) {
		number++
		comment := strings.TrimSpace(line)
		// Directives such as +kubebuilder and go:build cannot be wrapped.
		if width := utf8.RuneCountInString(strings.TrimRight(line, "\n")); width > maxCommentColumns && strings.HasPrefix(comment, "// ") &&
			!strings.HasPrefix(comment, "// +") {
			t.Errorf("%s:%d: comment has %d columns, at most %d are allowed", path, number, width, maxCommentColumns)
		}
	}
}
