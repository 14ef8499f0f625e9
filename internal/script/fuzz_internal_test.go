package script

import (
	"encoding/json"
	"errors"
	"testing"

	lua "github.com/yuin/gopher-lua"

	"github.com/towline/towline/test/fuzzing"
)

// FuzzScript runs scripts of users. They have more memory than the limit, because the limit is for live objects.
func FuzzScript(f *testing.F) {
	for _, text := range []string{
		`function evaluate() return {resources = "a"} end`,
		`function evaluate(r) local t = {} for k, v in pairs(r) do table.insert(t, k) end table.sort(t) return {resources = json.encode(t)} end`,
		`function evaluate() local s = "a" for i = 1, 100 do s = s .. s end return {resources = s} end`,
		`function evaluate() return {resources = string.rep("ab", 1000):gsub("(a)(b)", "%2%1")} end`,
		`function evaluate() return {resources = strings.Join(strings.Split("a,b", ","), "-"), x = json.decode("[1,{\"a\":null}]")} end`,
		`while true do end`, `local function f() return f() + 1 end f()`, `evaluate = 1`, `a = {} a[1e9] = 1 a[-1] = a`,
		`function evaluate() return {resources = string.format("%5.2f|%-10s|%q|%x", 1/3, "x", "y\n", 255)} end`,
		`function evaluate() local ok, err = pcall(function() error({code = 1}) end) return {resources = tostring(err), s = base64Encode("x")} end`,
		`local co = coroutine; string.find(("a"):rep(300), (".-"):rep(20))`, `goto x ::x:: return function(...) return ... end`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		fuzzing.Within(t, 8*maxMemory, func() {
			s, err := NewForContent(t.Context(), text)
			if err != nil {
				checkScriptError(t, err)
				return
			}
			defer s.Close()
			if _, err = s.Evaluate("resources", s.ToLua(map[string]any{"a": map[string]any{"kind": "ConfigMap", "n": int64(1)}})); err != nil {
				checkScriptError(t, err)
			}
		})
	})
}

func checkScriptError(t *testing.T, err error) {
	t.Helper()
	for _, limit := range []error{ErrInvalid, errTime, errSteps, errMemory} {
		if errors.Is(err, limit) {
			return
		}
	}
	t.Errorf("the error is neither that of a limit nor ErrInvalid: %v", err)
}

// FuzzPattern matches patterns whose cost is within the limit: such a match ends soon.
func FuzzPattern(f *testing.F) {
	f.Add("aaaaaaaaaaaaaaaaaaaaaaaaaaaa", ".-.-.-b")
	f.Add("key = value", "^(%w+)%s*=%s*(%w+)$")
	f.Add("((a)(b))", "%b()")
	f.Add("THE (quick) fox", "%((%a+)%)")
	f.Add("abab", "(ab)%1")
	f.Add("a]b", "[]]")
	f.Add("a^b", "[^%^]*%")
	f.Add("x", "[a-")
	f.Fuzz(func(t *testing.T, subject, pattern string) {
		if len(pattern) > maxPatternLength || matchCost(subject, pattern) > maxMatchCost {
			t.Skip("such a pattern is refused before")
		}
		// The library panics for some patterns, for example "%f" alone, and the interpreter makes that an error.
		s, err := New(t.Context(), `function evaluate(given) return {count = select(2, string.gsub(given.subject, given.pattern, "%0"))} end`)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		results := (len(subject) + 1) * 8 * (matchSize + captureSize*32)
		fuzzing.Within(t, uint64(results)+64<<20, func() {
			result, err := s.Evaluate("given", s.ToLua(map[string]any{"subject": subject, "pattern": pattern}))
			if err != nil {
				checkScriptError(t, err)
				return
			}
			if count, ok := result.RawGetString("count").(lua.LNumber); !ok || int(count) > len(subject)+1 {
				t.Errorf("%v matches in %d bytes", count, len(subject))
			}
		})
	})
}

// FuzzJSON decodes and encodes JSON in a script.
func FuzzJSON(f *testing.F) {
	f.Add(`{"a":[1,2.5,"x",true,null,{"b":[]}]}`)
	f.Add(`[[[[1]]]]`)
	f.Add(`{"":"\ud800"}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := NewForContent(t.Context(), `function evaluate(text) local v = json.decode(text) return {first = json.encode(v), second = json.encode(json.decode(json.encode(v)))} end`)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		result, err := s.Evaluate("text", lua.LString(text))
		if err != nil {
			checkScriptError(t, err)
			return
		}
		first, second := result.RawGetString("first").String(), result.RawGetString("second").String()
		if !json.Valid([]byte(first)) {
			t.Errorf("%q became %q, which is not JSON", text, first)
		}
		if first != second {
			t.Errorf("%q became %q, and that %q", text, first, second)
		}
	})
}
