package join

import "reflect"

// contains says whether live has everything that desired says. Lists are compared as a whole, but for owners: an object
// may have more.
func contains(live, desired map[string]any) bool {
	for key, want := range desired {
		got, ok := live[key]
		switch {
		case want == nil:
		case !ok:
			return isEmpty(want)
		case key == "ownerReferences":
			if !containsEach(got, want) {
				return false
			}
		case !containsValue(got, want):
			return false
		}
	}
	return true
}

func containsValue(got, want any) bool {
	switch want := want.(type) {
	case map[string]any:
		got, ok := got.(map[string]any)
		return ok && contains(got, want)
	case []any:
		got, ok := got.([]any)
		if !ok || len(got) != len(want) {
			return false
		}
		for i := range want {
			if !containsValue(got[i], want[i]) {
				return false
			}
		}
		return true
	}
	return reflect.DeepEqual(got, want)
}

// containsEach says whether each element of want is in got.
func containsEach(got, want any) bool {
	have, _ := got.([]any)
	wanted, _ := want.([]any)
	for _, one := range wanted {
		found := false
		for _, other := range have {
			found = found || containsValue(other, one)
		}
		if !found {
			return false
		}
	}
	return true
}

func isEmpty(value any) bool {
	switch value := value.(type) {
	case map[string]any:
		return len(value) == 0
	case []any:
		return len(value) == 0
	}
	return false
}

// restore gives every field of now that written has the value that it has in before, or none.
func restore(now, written, before map[string]any) {
	for key, value := range written {
		old, had := before[key]
		deeper, isMap := value.(map[string]any)
		current, isNowMap := now[key].(map[string]any)
		oldMap, wasMap := old.(map[string]any)
		switch {
		case isMap && isNowMap && (wasMap || !had):
			restore(current, deeper, oldMap)
		case had:
			now[key] = old
		default:
			delete(now, key)
		}
	}
}
