package script_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/towline/towline/internal/script"
)

// evaluate runs a script with one resource and returns the field text of its result.
func evaluate(t *testing.T, text string) (string, error) {
	t.Helper()
	s, err := script.NewForContent(t.Context(), text)
	if err != nil {
		return "", err
	}
	defer s.Close()
	result, err := s.Evaluate("resources", s.ToLua(map[string]any{"web": map[string]any{
		"metadata": map[string]any{"name": "web-1", "labels": map[string]any{"tier": "front"}, "annotations": map[string]any{"a/b": "c"}},
		"spec":     map[string]any{"replicas": int64(3), "ports": []any{int64(80), int64(443)}},
	}}))
	if err != nil {
		return "", err
	}
	return result.RawGetString("text").String(), nil
}

func TestFunctionsForContent(t *testing.T) {
	t.Parallel()
	for expression, want := range map[string]string{
		`getResource(resources, "web").metadata.name`:                                                "web-1",
		`tostring(getResource(resources, "other"))`:                                                  "nil",
		`getLabel(resources.web, "tier")`:                                                            "front",
		`tostring(getLabel(resources.web, "other"))`:                                                 "nil",
		`tostring(getLabel({}, "tier"))`:                                                             "nil",
		`getAnnotation(resources.web, "a/b")`:                                                        "c",
		`base64Encode("text")`:                                                                       "dGV4dA==",
		`base64Decode("dGV4dA==")`:                                                                   "text",
		`select(2, base64Decode("?"))`:                                                               "the text is not base64",
		`json.encode(resources.web.spec)`:                                                            `{"ports":[80,443],"replicas":3}`,
		`json.encode({[2] = "x", a = "<"})`:                                                          `{"2":"x","a":"\u003c"}`,
		`json.encode({"x", nil, "z", a = "y"})`:                                                      `{"1":"x","3":"z","a":"y"}`,
		`json.decode("{\"a\": [1, {\"b\": \"c\"}]}").a[2].b`:                                         "c",
		`select(2, json.decode("{"))`:                                                                "the text is not JSON",
		`strings.ToUpper("a") .. strings.ToLower("B") .. strings.TrimSpace(" c ")`:                   "Abc",
		`strings.Join(strings.Split("a-b-c", "-"), "+")`:                                             "a+b+c",
		`strings.Replace("aaa", "a", "b", 2) .. strings.Replace("aaa", "a", "b", -1)`:                "bbabbb",
		`tostring(strings.Contains("abc", "b") and strings.HasPrefix("abc", "a"))`:                   "true",
		`tostring(strings.HasSuffix("abc", "b"))`:                                                    "false",
		`strings.Compare("a", "b") .. strings.Compare("b", "b")`:                                     "-10",
		`strings.Trim("xax", "x") .. strings.TrimPrefix("xa", "x") .. strings.TrimSuffix("ax", "x")`: "aaa",
		`string.gsub("a-b-c", "%w", {a = "x", b = 2, c = false})`:                                    "x-2-c",
		`select(2, string.gsub("a-b-c", "%w", {}))`:                                                  "3",
		`string.gsub("k=v, l=w", "(%w)=(%w)", function(key, value) return value .. "=" .. key end)`:  "v=k, w=l",
		`string.gsub("k=v", "(%w)=%w", {k = "first capture"})`:                                       "first capture",
		`string.gsub("abc", "()b", function(position) return position end)`:                          "a2c",
		`string.gsub("abc", "", function() return "." end)`:                                          ".a.b.c.",
		`string.gsub("aaa", "a", function() return "b" end, 2)`:                                      "bba",
		`string.gsub("ab", "%w", string.upper)`:                                                      "AB",
		`("${name} is ${age}"):gsub("%${(%w+)}", {name = "web"})`:                                    "web is ${age}",
		`require("json").encode("a") .. require("strings").ToUpper("b")`:                             `"a"B`,
	} {
		got, err := evaluate(t, "function evaluate() print('ignored') return {text = "+expression+"} end")
		if err != nil || got != want {
			t.Errorf("%s: got %q, %v, want %q", expression, got, err, want)
		}
	}
}

func TestScriptsForContentEnd(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ text, want string }{
		"an unknown module":    {`local http = require("http")`, `invalid script: line 1: module "http" does not exist`},
		"a resource of no one": {"function evaluate()\n return {text = resources.x.y}\nend", "invalid script: line 2: attempt to index"},
		"files":                {`function evaluate() return io.open("/etc/passwd") end`, "invalid script: line 1: "},
		"a cycle":              {`function evaluate() local t = {} t.t = t return json.encode(t) end`, "tables are nested deeper than 100"},
		"a wide tree": {
			`function evaluate() local t = {"x"} for i = 1, 40 do t = {t, t} end return json.encode(t) end`,
			"the script ", // makes too much text or, on a busy machine, takes too long
		},
		"deep JSON":         {`function evaluate() return json.decode(("["):rep(1000)) end`, "nested deeper than 100"},
		"long JSON":         {`function evaluate() return json.decode("[" .. ("0,"):rep(5e6) .. "0]") end`, "the script makes more than"},
		"many parts":        {`function evaluate() return strings.Split(("a"):rep(1e6), "") end`, "the script makes more than"},
		"long replacements": {`function evaluate() return strings.Replace(("a"):rep(1e5), "a", ("b"):rep(1e5), -1) end`, "the script makes more than"},
		"long replacements by a function": {
			`function evaluate() local b = ("b"):rep(1e5) return string.gsub(("a"):rep(1e5), "a", function() return b end) end`,
			"the script ", // makes too much text or, depending on the garbage collector, takes too much memory
		},
		"long replacements by a table":  {`function evaluate() return string.gsub(("a"):rep(1e5), "a", {a = ("b"):rep(1e5)}) end`, "the script makes more than"},
		"many matches":                  {`function evaluate() return string.gsub(("a"):rep(4e5), "", {}) end`, "may match too often"},
		"a slow pattern":                {`function evaluate() return string.gsub(("a"):rep(2000), ".-.-.-b", {}) end`, "may take too long"},
		"an endless replacement":        {`function evaluate() return string.gsub("a", "a", function() while true do end end) end`, "the script took "},
		"a replacement that is a table": {`function evaluate() return string.gsub("a", "a", function() return {} end) end`, "line 1: invalid replacement value (a table)"},
		"an error of a replacement":     {`function evaluate() return string.gsub("a", "a", function() error("reason") end) end`, "line 1: reason"},
		"repeated encoding":             {`function evaluate() local s = "xxxx" while true do s = base64Encode(s) end end`, "the script makes more than"},
	} {
		if _, err := evaluate(t, test.text); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}

// TestEndlessScriptNamesItsLine does not run beside other tests, whose memory would count as that of the script.
//
//nolint:paralleltest // see above
func TestEndlessScriptNamesItsLine(t *testing.T) {
	_, err := evaluate(t, "function evaluate()\n  local i = 0\n  while true do i = i + 1 end\nend")
	if want := "line 3: the script took more than 5000000 steps"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %q", err, want)
	}
}

// TestOrderOfResults runs a script that lists the fields of an object, whose order in memory differs between runs.
func TestOrderOfResults(t *testing.T) {
	t.Parallel()
	object := map[string]any{}
	for i := range 50 {
		object[fmt.Sprintf("field-%02d", i)] = map[string]any{"b": int64(i), "a": "x", "c": []any{true, "y"}}
	}
	const text = `function evaluate(object)
  local names = {}
  for name, fields in pairs(object) do
    for field in pairs(fields) do table.insert(names, name .. "." .. field) end
  end
  return {text = table.concat(names, " ") .. json.encode(object)}
end`
	var first string
	for range 20 {
		s, err := script.NewForContent(t.Context(), text)
		if err != nil {
			t.Fatal(err)
		}
		result, err := s.Evaluate("resources", s.ToLua(object))
		if err != nil {
			t.Fatal(err)
		}
		got := result.RawGetString("text").String()
		s.Close()
		if first == "" {
			first = got
		}
		if got != first || !strings.HasPrefix(got, "field-00.a field-00.b field-00.c field-01.a ") {
			t.Fatalf("got %s, want %s", got, first)
		}
	}
}
